"""What is to be asked of a model, and what can be told of that before any model is read."""

import hashlib
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

from hlat.config.errors import ConfigError
from hlat.evaluation import humaneval, outline
from hlat.evaluation.library import Library
from hlat.evaluation.tasks import HUMANEVAL

_LONGEST_NAME = 40
"""Letters of an evaluation's name that say what it asks."""


@dataclass(frozen=True)
class Order:
    """What is to be evaluated on what.

    Attributes:
        tasks: Names of sets, tasks or groups, and HumanEval's.
        shots: Examples before each question of the harness's own tasks; None: as many as they say.
        limit: Questions of each task; None: all.
        data: Folder of copies of data sets; None: the harness loads them.
        output: Where the scores are written; None: beside what is evaluated.
        followed: A run all of whose kept checkpoints are meant, also those to come; None: one model
            alone.
        code: How HumanEval's samples are drawn and judged.
        resumes: Whether tasks that have scores already are left out, since all of it may be started
            again at any time.
    """

    tasks: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    data: Path | None = None
    output: Path | None = None
    followed: Path | None = None
    code: humaneval.Settings = field(default_factory=humaneval.Settings)
    resumes: bool = False

    @property
    def harness_tasks(self) -> list[str]:
        """The tasks that lm-evaluation-harness asks."""
        return [name for name in self.tasks if name != HUMANEVAL]

    def name(self, source: str, step: int | None) -> str:
        """A name that is the same whenever the same is asked of the same model."""
        asked = (self.tasks, self.shots, self.limit, self.output, self.code.num_samples)
        told = repr((Path(source).name, step, self.followed is not None, *map(str, asked)))
        words = re.sub(r"[^A-Za-z0-9_]+", "_", "-".join(self.tasks))[:_LONGEST_NAME]
        return f"{words}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def refuse(order: Order, step: int | None) -> None:
    """Return if what is ordered goes together.

    Args:
        order: It.
        step: The checkpoint that was named.

    Raises:
        ConfigError: It does not, or the folder that is to be followed is no run's.
    """
    if order.followed is None:
        return
    if step is not None or order.output is not None:
        raise ConfigError("follow=true is of all checkpoints; leave out --step and --output")
    if not outline.is_run(order.followed):
        raise ConfigError(
            f"follow=true needs the folder of a run that has begun, and {order.followed} has no "
            "config.yaml"
        )
    if HUMANEVAL in order.tasks and not order.code.run_generated_code:
        raise ConfigError(
            "follow=true leaves out what has scores, and HumanEval gets none without "
            "run_generated_code=true (docs/humaneval.md); set it, or leave out tasks=humaneval"
        )


def refuse_unknown(order: Order) -> None:
    """Return if there are such tasks, and the folder of their data, as far as this machine knows.

    Raises:
        ConfigError: There are not.
    """
    installed = importlib.util.find_spec("lm_eval") is not None
    Library(order.data).choose(order.harness_tasks if installed else [], order.shots)


def problems(order: Order) -> list[humaneval.Problem]:
    """HumanEval's, from the folder of copies.

    Raises:
        ConfigError: They are not there.
    """
    folder = order.data or Path()
    files = [folder / name for name in ("HumanEval.jsonl", "HumanEval.jsonl.gz")]
    found = next((file for file in files if file.is_file()), files[-1])
    return humaneval.read(found)[: order.limit]
