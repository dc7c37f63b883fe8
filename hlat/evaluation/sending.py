"""Looks at an evaluation before it is sent to where the nodes are.

A mistake should not be found when the job has waited for days. What is read is small: no weights,
and nothing that needs torch or the harness where this machine has neither.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hlat.checkpoint import places
from hlat.checkpoint.manifest import MARKER
from hlat.config.errors import ConfigError
from hlat.evaluation import order as orders
from hlat.evaluation import outline
from hlat.evaluation.machine import assumed, configure
from hlat.evaluation.order import Order
from hlat.evaluation.tasks import HUMANEVAL
from hlat.jobs.evaluation import Evaluation


def prepare(
    source: str,
    step: int | None,
    order: Order,
    words: Sequence[str],
    overrides: Sequence[str],
    sees_files: bool,
) -> Evaluation:
    """Return the evaluation, if it can be done.

    Args:
        source: The model, as it was named.
        step: The checkpoint of the run that was named.
        order: What is asked.
        words: What was typed, without what chooses the launcher.
        overrides: Those of the configuration among them.
        sees_files: Whether the job's files are those of this machine, which are looked at then.

    Raises:
        ConfigError: There is no such model, task or data, or the engine cannot be had.
    """
    found = None
    if sees_files or Path(source).exists():
        orders.refuse(order, step)
        found = outline.look(source)
        if order.followed is None and outline.is_run(Path(source)):
            _refuse_without(Path(source), step)
        if HUMANEVAL in order.tasks:
            orders.problems(order)
    config = assumed(overrides) if found is None else configure(found, overrides)
    orders.refuse_unknown(order if sees_files else replace(order, data=None))
    home = found.home if found is not None else Path()
    if home.is_relative_to(Path.cwd()):
        home = home.relative_to(Path.cwd())
    return Evaluation(order.name(source, step), source, home, tuple(words), config)


def _refuse_without(run: Path, step: int | None) -> None:
    """Return if a run has the checkpoint that is to be evaluated, as far as this machine knows."""
    home = places.recorded(run)
    if not isinstance(home, Path):
        return
    names = [path.parent.name for path in (home / "checkpoints").glob(f"step_*/{MARKER}")]
    steps = sorted(int(name[5:]) for name in names if name[5:].isdecimal())
    if not steps:
        raise ConfigError(f"{run} holds no checkpoint; follow=true evaluates each as it appears")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(f"--step={step}: {run} has no such checkpoint, only {there}")
