"""Rollback after loss spikes that last and after divergence, from the logged metrics.

Rank 0 evaluates; all ranks follow. A rollback loads the newest checkpoint before the bad steps and
skips their batches, in this and all later attempts. Checkpoints saved after that one are renamed so
that no attempt resumes from them.
"""

import enum
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlat.checkpoint import (
    checkpoint_lookup,
    checkpoint_store,
    retention,
    rollback_log,
    training_checkpoint,
)
from hlat.checkpoint.checkpoint_directory import build_checkpoint_root, parse_step
from hlat.checkpoint.checkpoint_lookup import VerifiedCheckpoint
from hlat.checkpoint.rollback_log import Rollback
from hlat.checkpoint.training_state import TrainingState
from hlat.config.batch_steps import count_tokens
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps, count_readable_batches
from hlat.data.data_loader import DataLoader
from hlat.distributed.object_group import broadcast_object, run_on_rank0
from hlat.engine.interface import Engine, StepMetrics
from hlat.recovery.spike_detector import SpikeDetector, is_finite
from hlat.tracking.tracker import Tracker


class NextAction(enum.Enum):
    """Action of the training loop after a check of the metrics."""

    CONTINUE = enum.auto()
    """Continue with the current state."""
    RESTART_FROM_CHECKPOINT = enum.auto()
    """Continue with the state of an earlier checkpoint, which engine and loader have loaded."""
    STOP = enum.auto()
    """End the run as diverged."""


class RollbackPolicy:
    """Rules for spikes and divergence of a run."""

    def __init__(
        self, config: Config, run_dir: Path, engine: Engine, loader: DataLoader, tracker: Tracker
    ) -> None:
        self._config, self._engine, self._loader, self._tracker = config, engine, loader, tracker
        root = build_checkpoint_root(run_dir, config.checkpoint.destination)
        self._checkpoints_dir = root / "checkpoints"
        self._num_skipped = 0
        self._spike_detector = self._build_spike_detector()

    @property
    def first_bad_step(self) -> int | None:
        """First of the bad steps up to the last one; None if it is good. Valid on rank 0."""
        return self._spike_detector.first_bad_step

    def has_diverged(self, step: int, metrics: StepMetrics) -> bool:
        """Add a logged step and log skipped updates and spikes; return True after divergence.

        Metrics that are not finite at the last step are a divergence, however short.
        """
        tracker, has_diverged = self._tracker, self._spike_detector.update(step, metrics)
        if metrics.num_skipped > self._num_skipped:
            count = metrics.num_skipped - self._num_skipped
            tracker.log_event("skip", step, count=count, reason="gradients were not finite")
            tracker.print_message(
                f"WARNING: step {step}: gradients are not finite; no weight was changed"
            )
            self._num_skipped = metrics.num_skipped
        if self._spike_detector.is_spike:
            average = self._spike_detector.average_grad_norm
            tracker.log_event("spike", step, grad_norm=metrics.grad_norm, average=average)
        is_last = step == compute_total_steps(self._config)
        has_diverged = has_diverged or (is_last and not is_finite(metrics))
        group = self._engine.parallel_state.world_group
        return group.any(group.is_rank0 and has_diverged)

    def roll_back(
        self, state: TrainingState, metrics: StepMetrics
    ) -> tuple[NextAction, TrainingState]:
        """Load the newest checkpoint before the bad steps; no save may be pending.

        Returns the action of the training loop and the state to continue with. The run stops if
        there is no such checkpoint, or if earlier rollbacks to it did not help.
        """
        tracker, group = self._tracker, self._engine.parallel_state.world_group
        first_bad_step = broadcast_object(group, self._spike_detector.first_bad_step)
        num_readable = count_readable_batches(self._config) + self._loader.num_skipped_batches
        rollbacks = rollback_log.load_rollbacks(self._checkpoints_dir, num_readable, group, tracker)
        checkpoint, problem = self._find_target_checkpoint(first_bad_step, rollbacks)
        reason = (
            f"loss, grad_norm and param_norm were {metrics.loss:.4g}, {metrics.grad_norm:.4g} and "
            f"{metrics.param_norm:.4g}, too high or not finite since step {first_bad_step}"
        )
        if checkpoint is None:
            tracker.log_event("diverge", state.step, reason=f"{reason}; {problem}")
            tracker.print_message(f"ERROR: {reason}; {problem}")
            return NextAction.STOP, state
        path, manifest = checkpoint.path, checkpoint.manifest
        target = training_checkpoint.load_training_state(checkpoint, group)
        batch = self._config.batch
        num_tokens = count_tokens(state.step, batch) - count_tokens(first_bad_step - 1, batch)
        batches = self._loader.last_batches(num_tokens // batch.sequence_length)
        rollbacks.append(Rollback(target.step, batches))
        run_on_rank0(group, lambda: rollback_log.save_rollbacks(self._checkpoints_dir, rollbacks))
        details = {"to": target.step, "left_out": [batches.start, batches.stop], "reason": reason}
        tracker.log_event("rollback", state.step, checkpoint=str(path), **details)
        tracker.print_message(
            f"WARNING: {reason}; rolling back to step {target.step} and skipping the last "
            f"{len(batches)} batches"
        )
        self._loader.load_state_dict(target.data)
        self._loader.skip_batches(rollback.skipped for rollback in rollbacks)
        checkpoint_store.load_checkpoint(path, self._engine.state_shards(), manifest)
        tracker.rewind(target.step)
        self._spike_detector = self._build_spike_detector()
        state = replace(state, step=target.step, tokens=target.tokens)
        return NextAction.RESTART_FROM_CHECKPOINT, state

    def _find_target_checkpoint(
        self, first_bad_step: int, rollbacks: list[Rollback]
    ) -> tuple[VerifiedCheckpoint | None, str]:
        """Return the checkpoint for a rollback, or the problem; quarantine newer checkpoints."""
        group = self._engine.parallel_state.world_group
        newest, _ = checkpoint_lookup.find_newest_checkpoint(
            self._checkpoints_dir,
            before_step=first_bad_step,
            process_group=group,
            trusted_keys=self._config.checkpoint.trusted_keys,
        )
        if newest is None:
            return None, f"there is no checkpoint from before step {first_bad_step}"
        step = parse_step(newest.path)
        num_rollbacks = sum(rollback.step == step for rollback in rollbacks)
        limit = self._config.recovery.max_same_failures
        if num_rollbacks + 1 >= limit:
            return None, f"recovery.max_same_failures={limit}, and it rolled back to {step} before"
        if group.is_rank0:
            retention.quarantine_checkpoints(self._checkpoints_dir, after_step=first_bad_step - 1)
        return newest, ""

    def _build_spike_detector(self) -> SpikeDetector:
        """Return a detector that includes the last logged steps, also of earlier attempts."""
        recovery = self._config.recovery
        rows = self._tracker.get_recent_rows(2 * recovery.spike_window)
        return SpikeDetector(recovery, [(row["step"], _parse_metrics(row)) for row in rows])


def _parse_metrics(row: dict[str, Any]) -> StepMetrics:
    """Return the metrics of a row, in which null stands for a value that is not finite."""
    loss, grad_norm, param_norm = (
        math.nan if row[key] is None else float(row[key])
        for key in ("loss", "grad_norm", "param_norm")
    )
    return StepMetrics(loss, grad_norm, param_norm)
