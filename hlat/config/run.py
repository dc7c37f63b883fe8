"""The root of the configuration, and the run's own settings."""

from dataclasses import dataclass, field

from hlat.config.batch import Batch
from hlat.config.checkpoint import Checkpoint
from hlat.config.compiler import Compiler
from hlat.config.data import Data
from hlat.config.engine import Engine
from hlat.config.evaluation import Evaluation
from hlat.config.hardware import Hardware
from hlat.config.model import Model
from hlat.config.optimizer import Optimizer
from hlat.config.parallelism import Parallelism
from hlat.config.phase import Phase
from hlat.config.precision import Precision
from hlat.config.recovery import Recovery
from hlat.config.schedule import Schedule
from hlat.config.tracking import Tracking


@dataclass
class Run:
    """Identity and length of a run."""

    name: str | None = None
    """Folder of the run under run.root; null: the model's name and a digest of what fixes the
    numbers."""
    root: str = "runs"
    """Folder that holds the runs."""
    seed: int = 12349
    """Seed of initial weights and data order (HLAT's default)."""
    steps: int | None = None
    """Stop after this many optimizer steps without changing the schedule; null: the schedule's and
    phase's end."""
    log_every: int = 1
    """Steps between rows of metrics.jsonl; the device is read only then."""
    force: bool = False
    """Go on where the planner says that the run does not fit its devices (docs/planning.md)."""


@dataclass
class Config:
    """Everything a run is told, one field per config group."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    batch: Batch = field(default_factory=Batch)
    parallelism: Parallelism = field(default_factory=Parallelism)
    precision: Precision = field(default_factory=Precision)
    data: Data = field(default_factory=Data)
    phase: Phase = field(default_factory=Phase)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    compiler: Compiler = field(default_factory=Compiler)
    engine: Engine = field(default_factory=Engine)
    hardware: Hardware = field(default_factory=Hardware)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    recovery: Recovery = field(default_factory=Recovery)
    tracking: Tracking = field(default_factory=Tracking)
    evaluation: Evaluation = field(default_factory=Evaluation)

    @property
    def num_processes(self) -> int:
        """Processes of the run: as many as the hardware has, or else as the layout asks for."""
        per_node, layout = self.hardware.processes_per_node, self.parallelism
        if per_node is None:
            return layout.tp * layout.pp * (layout.dp or 1)
        return self.hardware.nodes * per_node

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass on one data-parallel rank."""
        if self.batch.micro_batch_size is not None:
            return self.batch.micro_batch_size
        return max(1, self.batch.global_batch_size // self._dp)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of a step on each data-parallel rank."""
        return self.batch.global_batch_size // (self.micro_batch_size * self._dp)

    @property
    def _dp(self) -> int:
        """The data-parallel degree; at least 1, even of a layout that the rules refuse."""
        layout = self.parallelism
        return max(1, self.num_processes // max(1, layout.tp * layout.pp))
