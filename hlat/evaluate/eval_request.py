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
    """Tasks and settings of one evaluation.

    Attributes:
        tasks: Task sets, tasks or groups of lm-evaluation-harness, and HumanEval.
        shots: Few-shot examples of tasks outside the task sets; None: the default of each task.
        limit: Maximum number of questions of each task; None: all.
        data: Directory of local data sets; None: the harness downloads them.
        output: Path of the scores; None: the default path of the model.
        followed_run: Run of which each permanent checkpoint is evaluated as it appears; None: one
            model.
        humaneval_settings: Sampling and execution of HumanEval.
        skip_completed: Skip tasks with scores, since the job may be restarted at any time.
    """

    tasks: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    data: Path | None = None
    output: Path | None = None
    followed_run: Path | None = None
    humaneval_settings: humaneval.HumanEvalSettings = field(
        default_factory=humaneval.HumanEvalSettings
    )
    skip_completed: bool = False

    @property
    def harness_tasks(self) -> list[str]:
        """Tasks of lm-evaluation-harness."""
        return [name for name in self.tasks if name != HUMANEVAL]

    def build_name(self, source: str, step: int | None) -> str:
        """Return a deterministic name of the request for this model."""
        num_samples = self.humaneval_settings.num_samples
        settings = (self.tasks, self.shots, self.limit, self.output, num_samples)
        key = repr((Path(source).name, step, self.followed_run is not None, *map(str, settings)))
        prefix = re.sub(r"[^A-Za-z0-9_]+", "_", "-".join(self.tasks))[:_MAX_NAME_LENGTH]
        return f"{prefix}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def validate_request(request: EvalRequest, step: int | None) -> None:
    """Raise ConfigError if `follow=true` conflicts with other settings, `--step` or the run."""
    if request.followed_run is None:
        return
    if step is not None or request.output is not None:
        raise ConfigError("follow=true evaluates all checkpoints; remove --step and --output")
    if not model_metadata.is_run_dir(request.followed_run):
        raise ConfigError(
            f"follow=true needs the directory of a started run, and {request.followed_run} contains"
            " no config.yaml"
        )
    if HUMANEVAL in request.tasks and not request.humaneval_settings.run_generated_code:
        raise ConfigError(
            "follow=true skips tasks with scores, and HumanEval has no scores without "
            "run_generated_code=true (docs/humaneval.md); set it, or remove tasks=humaneval"
        )


def load_humaneval_problems(request: EvalRequest) -> list[humaneval.HumanEvalProblem]:
    """Return HumanEval's problems from the directory of local data sets.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    directory = request.data or Path()
    files = [directory / name for name in ("HumanEval.jsonl", "HumanEval.jsonl.gz")]
    path = next((file for file in files if file.is_file()), files[-1])
    return humaneval.load_problems(path)[: request.limit]
