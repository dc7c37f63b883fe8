"""Root of the configuration, and the settings of the run."""

from dataclasses import dataclass, field

from hlat.config.batch import BatchConfig
from hlat.config.bounds import bounded
from hlat.config.checkpoint import CheckpointConfig
from hlat.config.compiler import CompilerConfig
from hlat.config.data import DataConfig
from hlat.config.engine import EngineConfig
from hlat.config.evaluation import EvaluationConfig
from hlat.config.hardware import HardwareConfig
from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.config.parallelism import ParallelismConfig
from hlat.config.phase import PhaseConfig
from hlat.config.precision import PrecisionConfig
from hlat.config.profiler import ProfilerConfig
from hlat.config.recovery import RecoveryConfig
from hlat.config.schedule import ScheduleConfig
from hlat.config.study import StudyConfig
from hlat.config.tracking import TrackingConfig


@dataclass
class RunConfig:
    """Identity and length of a run."""

    name: str | None = None
    """Directory of the run under run.root; null: the model's name and a digest of the settings that
    determine the result."""
    root: str = "runs"
    """Directory of all runs."""
    seed: int = bounded(12349, min=0)
    """Seed of initial weights, data order and stochastic rounding (HLAT's default)."""
    init_seed: int | None = bounded(None, min=0)
    """Seed of the initial weights; null: seed."""
    data_seed: int | None = bounded(None, min=0)
    """Seed of the data order; null: seed. Runs with one data_seed and several init_seed differ in
    their initial weights only."""
    steps: int | None = bounded(None, min=1)
    """Stop after this many optimizer steps without changing the schedule; null: the end of schedule
    and phase."""
    log_every: int = bounded(1, min=1)
    """Steps between rows of metrics.jsonl; the device is synchronized only then."""
    repeat: bool = False
    """Train although another run in run.root has finished with the same settings, code and data."""
    force: bool = False
    """Train although the planner predicts that the devices run out of memory (docs/planning.md)."""

    @property
    def resolved_init_seed(self) -> int:
        """Seed of the initial weights."""
        return self.seed if self.init_seed is None else self.init_seed

    @property
    def resolved_data_seed(self) -> int:
        """Seed of the data order."""
        return self.seed if self.data_seed is None else self.data_seed


@dataclass
class Config:
    """Configuration of a run, one field per config group."""

    run: RunConfig = field(default_factory=RunConfig)
    extensions: list[str] = field(default_factory=list)
    """Python files of the user that register components (docs/guides/own-idea.md). Only the command
    line can set them, as extensions=[FILE,...]."""
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    phase: PhaseConfig = field(default_factory=PhaseConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compiler: CompilerConfig = field(default_factory=CompilerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    study: StudyConfig = field(default_factory=StudyConfig)

    @property
    def num_processes(self) -> int:
        """World size: given by the hardware, or else by the layout."""
        per_node, layout = self.hardware.processes_per_node, self.parallelism
        if per_node is None:
            return layout.tp * layout.pp * (layout.dp or 1)
        return self.hardware.nodes * per_node

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass on one data-parallel rank."""
        if self.batch.micro_batch_size is not None:
            return self.batch.micro_batch_size
        return max(1, self.batch.size_divisor // self._data_parallel_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of a step with the full batch on each data-parallel rank."""
        return self.batch.global_batch_size // (self.micro_batch_size * self._data_parallel_size)

    @property
    def _data_parallel_size(self) -> int:
        """Data-parallel degree; at least 1, even for an invalid layout."""
        layout = self.parallelism
        return max(1, self.num_processes // max(1, layout.tp * layout.pp))
