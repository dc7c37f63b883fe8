"""Design of an experiment: question, baseline, metric and budget."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hlat.config.bounds import bounded


class Direction(Enum):
    """Directions in which a metric improves."""

    minimize = "minimize"
    """Lower values are better."""
    maximize = "maximize"
    """Higher values are better."""


@dataclass
class LrGridConfig:
    """Geometric grid of learning rates around a center: center x factor^n, n from -below to above.

    A sweep with a factor has the grid as its axis optimizer.lr, and `hlat report` states the
    optimum.
    """

    factor: float | None = bounded(None, above=1, max=100)
    """Ratio of two neighbouring rates; null: the study searches no optimum."""
    center: float | None = bounded(None, above=0, below=float("inf"))
    """Rate in the center of the grid; null: optimizer.lr of the chosen presets."""
    below: int = bounded(3, min=0, max=20)
    """Number of rates below the center."""
    above: int = bounded(3, min=0, max=20)
    """Number of rates above the center."""
    transfer_over: str | None = None
    """Numeric setting, such as model.hidden_size, over which the movement of the optimum is
    computed; null: none."""


@dataclass
class MixtureSampleConfig:
    """Mixtures of the sources as an axis of a sweep: the base weights, and random ones around them.

    The weights are those of data.sources, for the whole run or, with min_start and max_start, for
    all steps before a last phase with random weights. A random mixture is from a Dirichlet
    distribution with the parameters strength x proportion. The logarithm of the strength is uniform
    between those of min_strength and max_strength (RegMix, arXiv 2407.01492, section 3.1, and
    Olmix: 0.1 to 5).
    """

    num_mixtures: int | None = bounded(None, min=2, max=100_000)
    """Number of mixtures with the base; null: the study varies no mixture."""
    seed: int = bounded(0, min=0)
    """Seed of the mixtures. A larger num_mixtures adds mixtures to those of a smaller one."""
    min_strength: float = bounded(1.0, above=0, below=float("inf"))
    """Smallest strength; far below the number of sources, most mixtures are a single source."""
    max_strength: float = bounded(10.0, above=0, below=float("inf"))
    """Largest strength; the standard deviation of a proportion p is sqrt(p (1 - p) / (strength +
    1))."""
    min_start: float | None = bounded(None, above=0, below=1)
    """Smallest start of a last phase as a fraction of the steps: the weights of this phase are
    sampled, around those of the last stage of a phase with two stages, or else of data.sources.
    null: the weights of the whole run are sampled."""
    max_start: float | None = bounded(None, above=0, below=1)
    """Largest start; the start of each mixture is uniform between both, in multiples of 0.01."""
    max_epochs: float = bounded(4.0, above=0, below=float("inf"))
    """Largest number of passes over a source in a run, for the sources of tokens_per_epoch; as
    data.warn_epochs."""
    tokens_per_epoch: dict[str, float] = bounded(  # noqa: RUF009 (a field)
        {}, above=0, below=float("inf")
    )
    """Training tokens of one pass over each source: tokens / epochs of the ledger of a run, which
    its report displays. A source without them is not limited."""


@dataclass
class StudyConfig:
    """Design of a sweep, stated before its runs; the sweep has the factors and seeds as its axes.

    `hlat plan +sweep=beta2` prints what the design can detect, and `hlat report` the verdicts.
    """

    question: str | None = None
    """Question that the study answers."""
    baseline: dict[str, Any] = field(default_factory=dict)
    """Value of each factor, by key, with which the others are compared. A factor that is not listed
    keeps its value: runs are compared within it. Empty: the first value of the last factor."""
    metric: str = "heldout_bits_per_byte"
    """Metric of a run: a column of `hlat runs`, `heldout_bits_per_byte.SOURCE`, `accuracy.PROBE`,
    `answer_bits_per_byte.PROBE`, or `scores.TASK`."""
    direction: Direction = Direction.minimize
    """Direction in which the metric improves."""
    smallest_difference: float | None = bounded(None, above=0)
    """Smallest difference of the metric that matters. A smaller one counts as none, and the seeds
    of an undecided comparison are computed for it; null: for the observed difference."""
    alpha: float = bounded(0.05, above=0, below=1)
    """Probability of at least one wrong verdict if no point differs from its baseline."""
    power: float = bounded(0.8, above=0, below=1)
    """Probability with which a difference that the study can detect is found."""
    spread: float | None = bounded(None, above=0)
    """Standard deviation over seeds of the difference between two points, for the plan of a study
    without earlier runs of this size; null: from the runs in run.root."""
    stop_worse: bool = False
    """Train no further seeds of a point that is worse than its baseline, tested after each seed.
    The p values account for the repeated tests. With `hydra/launcher=local` only."""
    lr_grid: LrGridConfig = field(default_factory=LrGridConfig)
    """Grid of a study that searches the best learning rate."""
    mixture: MixtureSampleConfig = field(default_factory=MixtureSampleConfig)
    """Mixtures of a study that searches the best weights of the sources (docs/scaling.md)."""
    budget_hours: float | None = bounded(None, above=0)
    """Hours of all runs, one after the other, that the plan compares with; null: no limit."""
    budget_usd: float | None = bounded(None, above=0)
    """Price of all runs that the plan compares with; null: no limit."""
