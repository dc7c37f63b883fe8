"""The checkpoints that a run keeps for ever, one by one as it trains.

What a run will remove is not evaluated: nobody could look again. A run that has ended adds its last
checkpoint.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from hlat.checkpoint import lookup, places, store
from hlat.checkpoint.manifest import MARKER
from hlat.checkpoint.places import Place
from hlat.config.errors import ConfigError
from hlat.config.recorded import settings
from hlat.evaluation import subject
from hlat.evaluation.subject import Subject
from hlat.tracking.journal import Journal
from hlat.tracking.replay import BEGINNINGS

SECONDS_BETWEEN_LOOKS = 30.0
"""Between looks for a new checkpoint."""
_ENDINGS = ("finish", "diverge", "give_up")


def kept(run: Path) -> list[Place]:
    """The checkpoints there are by now that stay, by step.

    Args:
        run: The run's folder.

    Raises:
        ConfigError: Its record says that it has none to be kept.
    """
    home = lookup.home(run)
    every, milestones = settings(run, "checkpoint.keep_every_steps", "checkpoint.milestone_tokens")
    own = dict(_steps(home / "checkpoints"))
    stays = {step: path for step, path in own.items() if every and step % every == 0}
    if milestones:
        stays |= dict(_steps(home / "milestones"))
    if own and has_ended(run):
        stays.setdefault(max(own), own[max(own)])
    return [path for _, path in sorted(stays.items())]


def first(run: Path, tokenizer: Path | None) -> Subject:
    """The first of them, once there is one.

    Args:
        run: The run's folder.
        tokenizer: The run's tokenizer.json, if it has moved.

    Raises:
        ConfigError: The run has ended without any.
    """
    while not (there := kept(run)):
        if has_ended(run):
            raise ConfigError(f"{run} has ended and holds no checkpoint")
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return subject.of_checkpoint(there[0], run, tokenizer)


def has_ended(run: Path) -> bool:
    """Whether a run will save no more, as its record says."""
    told = [
        row["event"]
        for row in Journal(run / "events.jsonl").rows()
        if row["event"] in (*BEGINNINGS, *_ENDINGS)
    ]
    return bool(told) and told[-1] in _ENDINGS


def _steps(folder: Place) -> Iterator[tuple[int, Place]]:
    """Complete checkpoints of a folder."""
    if folder.is_dir():
        for path in places.steps(folder):
            if (step := store.step_of(path)) is not None and (path / MARKER).exists():
                yield step, path
