"""Judges every logged step, and takes a run back when it has lost its way.

The first rank judges and all do as it says. A rollback goes to the newest checkpoint from before
the bad steps and leaves out their batches, for this attempt and every later one; what was saved
since is kept under a name that nobody resumes from.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlat.checkpoint import places, retention, store
from hlat.config.run import Config
from hlat.data.loader import Loader
from hlat.engine.interface import Engine, Numbers
from hlat.parallelism.group import Group, tell
from hlat.recovery.divergence import Verdict, Watch
from hlat.recovery.resume import batches_left_out
from hlat.state import TrainingState
from hlat.tracking.tracker import Tracker


class Guard:
    """Watches over the numbers of a run.

    Args:
        config: The run.
        folder: Its folder.
        engine: What a rollback fills.
        loader: What a rollback moves.
        tracker: The record, which also tells of earlier attempts.
    """

    def __init__(
        self, config: Config, folder: Path, engine: Engine, loader: Loader, tracker: Tracker
    ) -> None:
        self._config, self._engine, self._loader, self._tracker = config, engine, loader, tracker
        self._folder = places.home(folder, config.checkpoint.destination) / "checkpoints"
        self._num_skipped = 0
        self._watch = self._new_watch()

    @property
    def content(self) -> bool:
        """Whether the last logged step was good, as the leader sees it."""
        return self._watch.first_bad is None

    def allows(self, step: int, numbers: Numbers) -> bool:
        """Judge a logged step; returns whether the run may go on from here."""
        tracker, verdict = self._tracker, self._watch.judge(step, numbers)
        lost = self._everyone.leads and verdict is Verdict.ROLL_BACK
        if numbers.num_skipped > self._num_skipped:
            count = numbers.num_skipped - self._num_skipped
            tracker.event("skip", step, count=count, reason="gradients were not finite")
            tracker.say(f"WARNING: step {step}: gradients are not finite; no weight was changed")
            self._num_skipped = numbers.num_skipped
        if self._watch.spiked:
            tracker.event("spike", step, grad_norm=numbers.grad_norm)
        return not self._everyone.any(lost)

    def roll_back(self, state: TrainingState, numbers: Numbers) -> TrainingState | None:
        """Go back to a checkpoint; no save may be under way.

        Returns:
            The state to go on from; None: there is no checkpoint to go back to, or the run has gone
            back there before and it did not help.
        """
        tracker, first_bad = self._tracker, tell(self._everyone, self._watch.first_bad)
        path, refused = self._target(first_bad)
        reason = (
            f"loss, grad_norm and param_norm were {numbers.loss:.4g}, {numbers.grad_norm:.4g} and "
            f"{numbers.param_norm:.4g}, too high or not finite since step {first_bad}"
        )
        if path is None:
            tracker.event("diverge", state.step, reason=f"{reason}; {refused}")
            tracker.say(f"ERROR: {reason}; {refused}")
            return None
        checkpoint = places.at(path)
        before = TrainingState.from_json(store.load_state(checkpoint))
        batches = self._loader.newest(state.step - first_bad + 1)
        told = {"to": before.step, "left_out": [batches.start, batches.stop], "reason": reason}
        tracker.event("rollback", state.step, checkpoint=path, **told)
        tracker.say(
            f"WARNING: {reason}; going back to step {before.step} without the {len(batches)} "
            "batches since then"
        )
        self._loader.restore(before.data)
        self._loader.leave_out(batches_left_out(self._everyone, tracker))
        store.restore(checkpoint, self._engine.chunks())
        tracker.rewind(before.step)
        self._watch = self._new_watch()
        return replace(state, step=before.step, tokens=before.tokens)

    @property
    def _everyone(self) -> Group:
        return self._engine.world.everyone

    def _target(self, first_bad: int) -> tuple[str | None, str]:
        """The checkpoint to go back to, or why not; newer ones go aside."""
        everyone, rank = self._everyone, self._engine.world.rank
        path, _ = retention.newest_valid(
            self._folder, before=first_bad, everyone=everyone, rank=rank
        )
        if path is None:
            return None, f"there is no checkpoint from before step {first_bad}"
        step = store.step_of(path)
        alike = [row for row in self._tracker.events("rollback") if row["to"] == step]
        limit = self._config.recovery.max_same_failures
        if tell(everyone, len(alike) + 1 >= limit):
            return None, f"recovery.max_same_failures={limit}, and it went back to {step} before"
        if everyone.leads:
            retention.set_aside(self._folder, after=first_bad - 1)
        return str(path), ""

    def _new_watch(self) -> Watch:
        """A watch that knows the last logged steps, of this attempt and earlier ones."""
        recovery = self._config.recovery
        rows = self._tracker.recent(2 * recovery.spike_window)
        return Watch(recovery, [(row["step"], _numbers(row)) for row in rows])


def _numbers(row: dict[str, Any]) -> Numbers:
    """The numbers of a row, in which null stands for one that was not finite."""

    def value(name: str) -> float:
        return math.nan if row[name] is None else float(row[name])

    return Numbers(value("loss"), value("grad_norm"), value("param_norm"))
