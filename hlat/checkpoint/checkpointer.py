"""Checkpoint saves, asynchronous by default (async_save in torch).

Training waits only for the copy of the state to host memory; a thread writes it while later steps
run. Results are logged from the training thread, because the run's record has a single writer.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint import checkpoint_store, retention
from hlat.checkpoint.checkpoint_directory import build_checkpoint_root
from hlat.checkpoint.checkpoint_signature import load_signer
from hlat.checkpoint.training_state import TrainingState
from hlat.config.run import Config
from hlat.config.run_steps import is_milestone
from hlat.data.data_loader import DataLoader, merge_state_dicts
from hlat.distributed.object_group import broadcast_object
from hlat.distributed.state_shard import BUFFERS, StateShard
from hlat.engine import graph_extraction
from hlat.engine.interface import Engine
from hlat.optim.optimizer_spec import EMA, find_average
from hlat.storage.storage_path import StoragePath
from hlat.tracking.tracker import Tracker

_DISK_FULL_ERRORS = (ENOSPC, EDQUOT)
_CLOSE_TIMEOUT_S = 60
"""Time for a pending save after a rank has failed: the other ranks still write their shards."""


@dataclass(frozen=True)
class _SaveResult:
    """Result of a save: the checkpoint's path, or the problem that prevented it."""

    path: StoragePath | None
    seconds: float
    problem: str = ""
    warning: str = ""


class Checkpointer:
    """Writer of checkpoints, with at most one save in progress."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        engine: Engine,
        loader: DataLoader,
        tracker: Tracker,
        verify_replicas: Callable[[Engine, Tracker, int], bool],
    ) -> None:
        """Create a writer; `verify_replicas` returns False if a step must not be saved."""
        self._config, self._engine, self._loader, self._tracker = config, engine, loader, tracker
        self._verify_replicas = verify_replicas
        root = build_checkpoint_root(run_dir, config.checkpoint.destination)
        self._checkpoints_dir, self._milestones_dir = root / "checkpoints", root / "milestones"
        is_rank0 = engine.parallel_state.background_group.is_rank0
        self._sign = load_signer(config.checkpoint.signing_key) if is_rank0 else None
        self._staging = HostStagingBuffer()
        self._executor = ThreadPoolExecutor(1, "hlat-checkpoint")
        self._pending: tuple[int, float, Future[_SaveResult]] | None = None
        """Step of the save in progress, the time that training waited for the copy, the result."""
        self._last_save_succeeded = True
        self._buffers_ready: Future[None] | None = None
        if config.checkpoint.asynchronous:
            self._buffers_ready = self._executor.submit(
                self._staging.allocate, [*engine.saved_state_shards()]
            )

    def is_save_due(self, step: int) -> bool:
        """Return True if the configuration requests a save after `step`."""
        return step % self._config.checkpoint.every_steps == 0 or is_milestone(step, self._config)

    def save(self, state: TrainingState, first_bad_step: int | None = None) -> bool:
        """Start a save after waiting for the pending one; the state may change on return.

        Older checkpoints are removed after this one is complete, unless the metrics since
        `first_bad_step` are bad: then only if the disk is full. Returns True unless a node is
        unhealthy; in that case nothing is saved.

        Raises:
            ReplicaMismatchError: Replicas differ and the faulty rank is unknown.
        """
        self.wait()
        if graph_extraction.is_extracting_graphs():
            self._trace_save_and_restore()
            return True
        start = time.perf_counter()
        if not self._verify_replicas(self._engine, self._tracker, state.step):
            return False
        state_json = self._build_state(state)
        result = Future[_SaveResult]()
        if self._buffers_ready is not None:
            self._buffers_ready.result()
            shards = self._staging.copy_state_shards(self._engine.saved_state_shards())
            result = self._executor.submit(
                self._write_checkpoint, state.step, shards, state_json, first_bad_step
            )
        else:
            shards = [*self._engine.saved_state_shards()]
            result.set_result(
                self._write_checkpoint(state.step, shards, state_json, first_bad_step)
            )
        self._pending = state.step, self._tracker.exclude_time(start), result
        return True

    def log_finished_save(self) -> None:
        """Log the pending save if it has finished."""
        if self._pending is not None and self._pending[-1].done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the pending save and log it; return True if the last save succeeded."""
        if self._pending is not None:
            (step, stall_seconds, future), self._pending = self._pending, None
            start = time.perf_counter()
            result = future.result()
            self._log_result(step, result, stall_seconds + self._tracker.exclude_time(start))
        return self._last_save_succeeded

    def close(self) -> None:
        """Wait up to a minute for the pending save after the run has failed elsewhere."""
        if self._pending is not None:
            with suppress(Exception):
                self._pending[-1].result(timeout=_CLOSE_TIMEOUT_S)
            self.log_finished_save()

    def _trace_save_and_restore(self) -> None:
        """Run the device operations of a save and a restore for graph extraction.

        The next step uploads the shards as after a restart.
        """
        self._engine.find_replica_mismatches()
        for shard in self._engine.state_shards():
            shard.tensor.copy_(shard.tensor)  # counts as a change

    def _build_state(self, state: TrainingState) -> dict[str, Any]:
        """Return state.json of the checkpoint on rank 0, else {}, and log the data ledger."""
        parallel, loader = self._engine.parallel_state, self._loader
        model_group = parallel.model_parallel_group
        data = loader.state_dict() if model_group is None or model_group.is_rank0 else None
        gathered = parallel.world_group.gather_object(data)
        if not gathered:
            return {}
        data = merge_state_dicts([shard for shard in gathered if shard is not None])
        self._tracker.log_event("ledger", state.step, stages=loader.compute_ledger_by_stage(data))
        for warning in loader.epoch_warnings(data):
            self._tracker.print_message(f"WARNING: {warning}")
        return dataclasses.replace(state, data=data).to_json()

    def _select_weights(self, shards: list[StateShard]) -> list[StateShard]:
        """Return the weights of a checkpoint without optimizer state.

        They are the average of an optimizer that evaluates it in place of the weights.
        """
        average = find_average(self._config.optimizer)
        key = "weights" if average is None or average is EMA else average.name
        weights = [
            dataclasses.replace(shard, name=f"weights/{shard.name.removeprefix(f'{key}/')}")
            for shard in shards
            if shard.name.startswith(f"{key}/")
        ]
        return [*weights, *(shard for shard in shards if shard.name.startswith(f"{BUFFERS}/"))]

    def _write_checkpoint(
        self,
        step: int,
        shards: list[StateShard],
        state_json: dict[str, Any],
        first_bad_step: int | None,
    ) -> _SaveResult:
        parallel, start, removed = self._engine.parallel_state, time.perf_counter(), list[str]()

        def save(directory: StoragePath, shards: list[StateShard]) -> StoragePath:
            while True:
                try:
                    return checkpoint_store.save_checkpoint(
                        directory, step, shards, state_json, parallel.background_group, self._sign
                    )
                except OSError as error:
                    name = self._remove_if_disk_is_full(error, first_bad_step)
                    if name is None:
                        raise
                    removed.append(name)

        self._tracker.sync()  # the rows of the steps in this checkpoint
        try:
            path = save(self._checkpoints_dir, shards)
            if is_milestone(step, self._config):
                weights = self._select_weights(shards)
                if state_json:
                    state_json = TrainingState.from_json(state_json).to_weights_only().to_json()
                save(self._milestones_dir, weights)
        except OSError as error:
            return _SaveResult(None, time.perf_counter() - start, str(error))
        seconds, warning = time.perf_counter() - start, ""
        if removed:
            warning = f"the disk was full, so {', '.join(removed)} was removed"
        if first_bad_step is None and parallel.background_group.is_rank0:
            config = self._config.checkpoint
            try:
                retention.prune_checkpoints(
                    self._checkpoints_dir,
                    config.keep_last,
                    config.keep_every_steps,
                    verified=path,
                    trusted_keys=config.trusted_keys,
                )
            except OSError as error:
                warning = f"cannot remove old checkpoints: {error}"
        return _SaveResult(path, seconds, warning=warning)

    def _remove_if_disk_is_full(self, error: OSError, first_bad_step: int | None) -> str | None:
        """Remove one checkpoint if the disk of any rank is full; return its name on all ranks."""
        group, name = self._engine.parallel_state.background_group, ""
        config = self._config.checkpoint
        if not group.any(error.errno in _DISK_FULL_ERRORS):
            return None
        if group.is_rank0:
            with suppress(OSError):
                name = retention.remove_oldest(
                    self._checkpoints_dir,
                    first_bad_step,
                    config.keep_every_steps,
                    config.trusted_keys,
                )
        return broadcast_object(group, name) or None

    def _log_result(self, step: int, result: _SaveResult, stall_seconds: float) -> None:
        tracker = self._tracker
        self._last_save_succeeded = result.path is not None
        seconds = {"stall_seconds": stall_seconds, "seconds": result.seconds}
        if result.path is None:
            tracker.print_message(
                f"WARNING: no checkpoint at step {step}: {result.problem}; older ones are intact"
            )
            tracker.log_event("checkpoint_failed", step, reason=result.problem, **seconds)
        else:
            tracker.log_event("checkpoint", step, path=str(result.path), **seconds)
        if result.warning:
            tracker.print_message(f"WARNING: {result.warning}")


class HostStagingBuffer:
    """Host memory for one copy of the shards that this process saves, reused by every save.

    The copy is written to disk while training continues. Paging in new memory takes several times
    as long as the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def allocate(self, shards: Iterable[StateShard]) -> None:
        """Page in memory for the shards that this process saves; meant for a separate thread."""
        for shard in shards:
            if shard.is_main_replica:
                # NumPy does not start a thread pool for this thread, as torch does
                self._get_buffer(shard).reshape(-1).view(torch.uint8).numpy().fill(0)

    @torch.no_grad()
    def copy_state_shards(self, shards: Iterable[StateShard]) -> list[StateShard]:
        """Return copies of the shards that this process saves, valid until the next call."""
        return [
            dataclasses.replace(shard, tensor=self._get_buffer(shard).copy_(shard.tensor))
            for shard in shards
            if shard.is_main_replica
        ]

    def _get_buffer(self, shard: StateShard) -> torch.Tensor:
        key, tensor = (shard.name, shard.offset), shard.tensor
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._buffers[key]
