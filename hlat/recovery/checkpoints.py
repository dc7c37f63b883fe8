"""The saves of a run: begun between two steps, written while the next ones run.

Training waits for the copy of the state only. What became of a save is told between later steps,
because the record has one writer; whoever needs to know it waits with `finish`.
"""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint import places, retention, store
from hlat.checkpoint.chunk import Chunk
from hlat.checkpoint.staging import Staging
from hlat.config.run import Config
from hlat.data.loader import Loader, merge_states
from hlat.engine import tracing
from hlat.engine.interface import Engine
from hlat.recovery import copies
from hlat.state import TrainingState
from hlat.tracking.tracker import Tracker

_SECONDS_TO_END = 60
"""Given to a save under way when a rank has failed: its peers still write their part."""


@dataclass(frozen=True)
class _Outcome:
    """How a save ended: its checkpoint or why there is none, and what else went wrong."""

    path: places.Place | None
    seconds: float
    problem: str = ""
    warning: str = ""


@dataclass(frozen=True)
class _Save:
    """A save that was begun: what training waited for its copy, and what it will have been."""

    step: int
    stall_seconds: float
    outcome: "Future[_Outcome]"


class Checkpoints:
    """Saves everything that `resume` needs, one save at a time."""

    def __init__(
        self, config: Config, folder: Path, engine: Engine, loader: Loader, tracker: Tracker
    ) -> None:
        self._config, self._engine, self._loader, self._tracker = config, engine, loader, tracker
        home = places.home(folder, config.checkpoint.destination)
        self._folder, self._milestones = home / "checkpoints", home / "milestones"
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, "hlat-checkpoint")
        self._begun: _Save | None = None
        self._succeeded = True
        self._memory: Future[None] | None = None
        if config.checkpoint.asynchronous:
            self._memory = self._thread.submit(self._staging.prepare, [*engine.chunks()])

    def is_due(self, step: int) -> bool:
        """Whether the configuration asks for a save after this step."""
        return step % self._config.checkpoint.every_steps == 0 or self._is_milestone(step)

    def save(self, state: TrainingState, prune: bool) -> bool:
        """Begin to save; the state may change when this returns. Waits for a save under way.

        Args:
            state: Where the run stands.
            prune: Whether older checkpoints may go once this one is there.

        Returns:
            Whether every node may be trusted; nothing is saved else.

        Raises:
            CopiesDifferError: There is no telling which rank holds the state that is right.
        """
        self.finish()
        if tracing.only_traces():
            self._show_graphs()
            return True
        begin = time.perf_counter()
        if not copies.agree(self._engine, self._tracker, state.step):
            return False
        contents = self._contents(state)
        if self._memory is not None:
            self._memory.result()
            chunks = self._staging.copy(self._engine.chunks())
            outcome = self._thread.submit(self._write, state.step, chunks, contents, prune)
        else:
            outcome = Future()
            outcome.set_result(self._write(state.step, [*self._engine.chunks()], contents, prune))
        self._begun = _Save(state.step, self._tracker.leave_out(begin), outcome)
        return True

    def report(self) -> None:
        """Tell of the save that has ended since, if one has."""
        if self._begun is not None and self._begun.outcome.done():
            self.finish()

    def finish(self) -> bool:
        """Wait for the save under way and tell of it; returns whether the last one succeeded."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begin = time.perf_counter()
            outcome = begun.outcome.result()
            self._tell(begun, outcome, begun.stall_seconds + self._tracker.leave_out(begin))
        return self._succeeded

    def close(self) -> None:
        """Give a save under way a minute when something else has ended the run."""
        if self._begun is not None:
            with suppress(Exception):
                self._begun.outcome.result(timeout=_SECONDS_TO_END)
            self.report()

    def _show_graphs(self) -> None:
        """Do on the device what a save does, for a compiler to see, and write nothing."""
        self._engine.compare_copies()
        for chunk in self._engine.chunks():
            if chunk.saved:
                chunk.tensor.cpu()

    def _contents(self, state: TrainingState) -> dict[str, Any]:
        """What the checkpoint says besides tensors, on the leader; tells of the data so far."""
        world, loader = self._engine.world, self._loader
        draws = world.peers is None or world.peers.leads
        states = world.everyone.collect(loader.state() if draws else None)
        if not states:
            return {}
        data = merge_states([one for one in states if one is not None])
        self._tracker.event("ledger", state.step, stages=loader.ledger_by_stage(data))
        for sentence in loader.news(data):
            self._tracker.say(f"WARNING: {sentence}")
        return dataclasses.replace(state, data=data).to_json()

    def _write(
        self, step: int, chunks: list[Chunk], contents: dict[str, Any], prune: bool
    ) -> _Outcome:
        world, begin = self._engine.world, time.perf_counter()
        place = (world.rank, world.background)
        try:
            path = store.save(self._folder, step, chunks, contents, *place)
            if self._is_milestone(step):
                weights = [chunk for chunk in chunks if chunk.name.startswith("weights/")]
                state = TrainingState.from_json(contents).of_weights() if contents else None
                told = {} if state is None else state.to_json()
                store.save(self._milestones, step, weights, told, *place)
        except OSError as error:
            return _Outcome(None, time.perf_counter() - begin, str(error))
        seconds = time.perf_counter() - begin
        prune = prune and world.background.leads
        return _Outcome(path, seconds, warning=self._prune(path) if prune else "")

    def _prune(self, saved: places.Place) -> str:
        """Remove old checkpoints; returns why that failed, if it did."""
        keep = self._config.checkpoint
        try:
            retention.prune(self._folder, keep.keep_last, keep.keep_every_steps, saved)
        except OSError as error:
            return f"cannot remove old checkpoints: {error}"
        return ""

    def _tell(self, begun: _Save, outcome: _Outcome, stall_seconds: float) -> None:
        tracker, step = self._tracker, begun.step
        self._succeeded = outcome.path is not None
        seconds = {"stall_seconds": stall_seconds, "seconds": outcome.seconds}
        if outcome.path is None:
            tracker.say(
                f"WARNING: no checkpoint at step {step}: {outcome.problem}; older ones are intact"
            )
            tracker.event("checkpoint_failed", step, reason=outcome.problem, **seconds)
        else:
            tracker.event("checkpoint", step, path=str(outcome.path), **seconds)
        if outcome.warning:
            tracker.say(f"WARNING: {outcome.warning}")

    def _is_milestone(self, step: int) -> bool:
        every, per_step = (
            self._config.checkpoint.milestone_tokens,
            self._config.batch.tokens_per_step,
        )
        return every is not None and step * per_step // every > (step - 1) * per_step // every
