"""Tasks and settings of one evaluation, and their validation before a model is loaded."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.evaluate import humaneval, model_metadata
from hlat.evaluate.paper_tasks import HUMANEVAL

_MAX_NAME_LENGTH = 40
"""Characters of the readable part of an evaluation's name."""


@dataclass(frozen=True)
class EvalRequest:
    """Model, tasks and settings of one evaluation.

    Attributes:
        source: Location of the model as given on the command line.
        tasks: Task sets, tasks or groups of lm-evaluation-harness, and HumanEval.
        step: Checkpoint of a run; None: the newest.
        follow: Evaluate each permanent checkpoint of the run `source` as it appears.
        shots: Few-shot examples of tasks outside the task sets; None: the default of each task.
        limit: Maximum number of questions of each task; None: all.
        data: Directory of local data sets; None: the harness downloads them.
        output: Path of the scores; None: the default path of the model.
        humaneval_settings: Sampling and execution of HumanEval.
        skip_completed: Skip tasks with scores, since the job may be restarted at any time.
    """

    source: str
    tasks: tuple[str, ...]
    step: int | None = None
    follow: bool = False
    shots: int | None = None
    limit: int | None = None
    data: Path | None = None
    output: Path | None = None
    humaneval_settings: humaneval.HumanEvalSettings = field(
        default_factory=humaneval.HumanEvalSettings
    )
    skip_completed: bool = False

    @property
    def harness_tasks(self) -> list[str]:
        """Tasks of lm-evaluation-harness."""
        return [name for name in self.tasks if name != HUMANEVAL]

    @property
    def followed_run(self) -> Path | None:
        """Run directory if `follow` is true."""
        return Path(self.source) if self.follow else None

    def build_name(self) -> str:
        """Return a deterministic name of the request for this model."""
        num_samples = self.humaneval_settings.num_samples
        settings = (self.tasks, self.shots, self.limit, self.output, num_samples)
        key = repr((Path(self.source).name, self.step, self.follow, *map(str, settings)))
        prefix = re.sub(r"[^A-Za-z0-9_]+", "_", "-".join(self.tasks))[:_MAX_NAME_LENGTH]
        return f"{prefix}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def validate_request(request: EvalRequest) -> None:
    """Raise ConfigError if `follow=true` conflicts with other settings or the run."""
    if not request.follow:
        return
    if request.step is not None or request.output is not None:
        raise ConfigError("follow=true evaluates all checkpoints; remove step= and output=")
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


def load_humaneval_problems(request: EvalRequest) -> list[humaneval.HumanEvalProblem]:
    """Return HumanEval's problems from the directory of local data sets."""
    directory = request.data or Path()
    files = [directory / name for name in ("HumanEval.jsonl", "HumanEval.jsonl.gz")]
    path = next((file for file in files if file.is_file()), files[-1])
    return humaneval.load_problems(path)[: request.limit]
