"""Tasks and settings of one evaluation, their validation before a model is loaded, and its job."""

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hlat.checkpoint import checkpoint_directory
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.config.command_job import CommandJob
from hlat.config.config_errors import ConfigError
from hlat.evaluate import humaneval
from hlat.evaluate.harness_settings import HarnessSettings
from hlat.evaluate.lm_eval_tasks import TaskLoader
from hlat.evaluate.paper_tasks import HUMANEVAL, OWN_TASKS
from hlat.evaluate.user_tasks import is_task_file
from hlat.inference import model_metadata
from hlat.inference.inference_config import build_inference_config, build_unverified_config
from hlat.tracking.run_directory import EVALUATIONS_DIR

_MAX_NAME_LENGTH = 40
"""Characters of the readable part of an evaluation's name."""


@dataclass(frozen=True)
class EvalRequest:
    """Model, tasks and settings of one evaluation.

    Attributes:
        source: Location of the model as given on the command line.
        tasks: Task sets, tasks or groups of lm-evaluation-harness, YAML files, and HumanEval.
        step: Checkpoint of a run; None: the newest.
        follow: Evaluate each permanent checkpoint of the run `source` as it appears.
        shots: Few-shot examples of tasks outside the task sets; None: the default of each task.
        limit: Maximum number of questions of each task; None: all.
        data: Directory of local data sets; None: the harness downloads them.
        include_path: Directory with YAML files of further tasks.
        harness: Settings of the harness.
        use_cache: File of responses that are not computed again.
        output: Path of the scores; None: the default path of the model.
        humaneval_settings: Sampling and execution of HumanEval.
        heldout: Run whose held-out sets are used, or text; None: the run of the model.
        data_overrides: Overrides of the recorded data and evaluation settings, for held-out sets.
        log_samples: Write the items of each harness task, as `lm_eval --log_samples`.
        skip_completed: Skip tasks with scores, since the job may be restarted at any time.
        ema: Evaluate the moving average of the weights.
    """

    source: str
    tasks: tuple[str, ...]
    step: int | None = None
    follow: bool = False
    shots: int | None = None
    limit: int | None = None
    data: Path | None = None
    include_path: Path | None = None
    harness: HarnessSettings = field(default_factory=HarnessSettings)
    use_cache: Path | None = None
    output: Path | None = None
    humaneval_settings: humaneval.HumanEvalSettings = field(
        default_factory=humaneval.HumanEvalSettings
    )
    heldout: str | None = None
    data_overrides: tuple[str, ...] = ()
    log_samples: bool = False
    skip_completed: bool = False
    ema: bool = False

    @property
    def harness_tasks(self) -> list[str]:
        """Tasks of lm-evaluation-harness."""
        return [name for name in self.tasks if name not in OWN_TASKS]

    @property
    def followed_run(self) -> Path | None:
        """Run directory if `follow` is true."""
        return Path(self.source) if self.follow else None

    def build_name(self) -> str:
        """Return a deterministic name of the request for this model."""
        num_samples = self.humaneval_settings.num_samples
        settings = (self.tasks, self.shots, self.limit, self.output, num_samples)
        key = repr((Path(self.source).name, self.step, self.follow, *map(str, settings)))
        if self.heldout is not None or self.data_overrides:
            key += repr((self.heldout, self.data_overrides))
        if self.log_samples:
            key += "log_samples"
        if self.include_path is not None:
            key += repr(self.include_path.name)
        if self.ema:
            key += "ema"
        if harness_settings := self.harness.to_dict():
            key += repr(harness_settings)
        names = (Path(name).stem if is_task_file(name) else name for name in self.tasks)
        prefix = re.sub(r"[^A-Za-z0-9_]+", "_", "-".join(names))[:_MAX_NAME_LENGTH]
        return f"{prefix}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def validate_request(request: EvalRequest) -> None:
    """Raise ConfigError if settings conflict with each other, or `follow=true` with the run."""
    validate_harness_settings(request)
    if not request.follow:
        return
    if request.step is not None or request.output is not None:
        raise ConfigError("follow=true evaluates all checkpoints; remove step= and output=")
    if request.ema:
        raise ConfigError(
            "follow=true evaluates the weights of each checkpoint; remove ema=true, or evaluate "
            "the moving average of a checkpoint with step=N"
        )
    if not model_metadata.is_run_dir(Path(request.source)):
        raise ConfigError(
            f"follow=true needs the directory of a started run, and {request.source} contains"
            " no config.yaml"
        )
    if HUMANEVAL in request.tasks and not request.humaneval_settings.run_generated_code:
        raise ConfigError(
            "follow=true skips tasks with scores, and HumanEval has no scores without "
            "run_generated_code=true (docs/humaneval.md); set it, or remove tasks=humaneval"
        )


def validate_harness_settings(request: EvalRequest) -> None:
    """Raise ConfigError if settings of the harness conflict with each other or the tasks."""
    given = [*request.harness.to_dict(), *(["use_cache"] if request.use_cache else [])]
    if given and not request.harness_tasks:
        raise ConfigError(
            f"{given[0]}= is a setting of tasks of lm-evaluation-harness, and "
            f"tasks={','.join(request.tasks)} has none; remove it"
        )
    request.harness.validate(request.limit)


def load_humaneval_problems(request: EvalRequest) -> list[humaneval.HumanEvalProblem]:
    """Return HumanEval's problems from the directory of local data sets."""
    directory = request.data or Path()
    files = [directory / name for name in ("HumanEval.jsonl", "HumanEval.jsonl.gz")]
    path = next((file for file in files if file.is_file()), files[-1])
    return humaneval.load_problems(path)[: request.limit]


def build_evaluation_job(
    request: EvalRequest,
    arguments: Sequence[str],
    overrides: Sequence[str],
    shares_filesystem: bool,
    waits: bool = False,
) -> CommandJob:
    """Validate an evaluation, and return its job for a launcher.

    Errors are reported before the job waits in a queue. The validation does not read weights, and
    requires neither torch nor lm-evaluation-harness.

    Args:
        request: Model, tasks and settings.
        arguments: Command-line arguments without overrides of the launcher.
        overrides: Configuration overrides in `arguments`.
        shares_filesystem: The job reads the files of this machine, so that they are validated.
        waits: The job starts after the run, so that the checkpoint may be missing.
    """
    source, metadata = Path(request.source), None
    validate_harness_settings(request)
    if shares_filesystem or source.exists():
        validate_request(request)
        metadata = model_metadata.load_metadata(request.source)
        if not request.follow and not waits and model_metadata.is_run_dir(source):
            _validate_checkpoint_exists(source, request.step)
        if HUMANEVAL in request.tasks:
            load_humaneval_problems(request)
    if metadata is None:
        config, base_dir = build_unverified_config(overrides), Path()
    else:
        config, base_dir = build_inference_config(metadata, overrides), metadata.base_dir
    # Task names are validated only where lm-evaluation-harness is installed
    names = request.harness_tasks if importlib.util.find_spec("lm_eval") is not None else []
    if not shares_filesystem:
        names = [] if request.include_path else [n for n in names if not is_task_file(n)]
    directories = (request.data, request.include_path) if shares_filesystem else (None, None)
    TaskLoader(*directories).resolve_tasks(names, request.shots)
    if base_dir.is_relative_to(Path.cwd()):
        base_dir = base_dir.relative_to(Path.cwd())
    name = request.build_name()
    scores_dir = base_dir / EVALUATIONS_DIR
    return CommandJob(
        "evaluate",
        name,
        request.source,
        scores_dir / name,
        tuple(arguments),
        config,
        scores_dir,
        request.step,
    )


def _validate_checkpoint_exists(run_dir: Path, step: int | None) -> None:
    """Raise ConfigError if a local run lacks the checkpoint to evaluate."""
    root = checkpoint_directory.load_checkpoint_root(run_dir)
    if not isinstance(root, Path):
        return
    paths = checkpoint_directory.list_steps(root / "checkpoints")
    if step is not None:
        paths = checkpoint_directory.list_steps(root / "milestones") | paths
    steps = [step for step, path in sorted(paths.items()) if (path / COMMIT_MARKER).exists()]
    if not steps:
        raise ConfigError(
            f"{run_dir} contains no checkpoint; follow=true evaluates each as it appears"
        )
    if step is not None and step not in steps:
        available = ", ".join(map(str, steps))
        raise ConfigError(f"step={step}: {run_dir} has no such checkpoint, only {available}")
