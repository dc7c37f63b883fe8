"""Check that a checkpoint restores the same state in this layout and on one process."""

from collections.abc import Iterator

import numpy as np

from hlat.checkpoint import checkpoint_store
from hlat.doctor import tolerances
from hlat.doctor.check_result import (
    CheckResult,
    FaultLocation,
    build_result,
    format_parallel_axes,
)
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.reduced_config import to_single_process
from hlat.doctor.sampled_inputs import StateTensors, sample_batch
from hlat.recovery.preflight_checks import format_first

_LEARNING_RATE = 2.0**-7


def check_checkpoint(harness: EngineHarness) -> Iterator[CheckResult]:
    """Save, train a step, load: check the state bit for bit, and the loss of the next step."""
    config, parallel = harness.config, harness.engine.parallel_state
    harness.train(2, _LEARNING_RATE)
    saved, tokens = harness.gather_state(), sample_batch(config, 2)
    axes, gap = format_parallel_axes(config), 0.0
    with harness.make_temporary_dir() as directory:
        shards = harness.engine.state_shards()
        path = checkpoint_store.save_checkpoint(directory, 2, shards, {}, parallel.world_group)
        expected = harness.train_step(tokens, _LEARNING_RATE)
        weights = harness.gather_full_tensors("weights")
        checkpoint_store.load_checkpoint(path, harness.engine.state_shards())
        faults = _find_differences(saved, harness.gather_state(), "here")
        repeated = harness.train_step(tokens, _LEARNING_RATE)
        repeated_weights = harness.gather_full_tensors("weights")
        if repeated.loss != expected.loss or _find_differences(
            {"weights": weights}, {"weights": repeated_weights}, ""
        ):
            faults.append(FaultLocation("next step", "here"))
        if harness.can_rebuild and config.num_processes > 1:
            with harness.with_config(to_single_process(config)) as other:
                checkpoint_store.load_checkpoint(path, other.engine.state_shards())
                faults += _find_differences(saved, other.gather_state(), axes)
                loss = other.train_step(tokens, _LEARNING_RATE).loss
                gap = abs(loss - expected.loss) / expected.loss
    if harness.is_rank0 and not gap <= tolerances.compute_loss_tolerance(config):
        faults.append(FaultLocation("next step", axes))
    layouts = "here and on one process" if config.num_processes > 1 else "here"
    yield build_result(
        "checkpoint",
        faults,
        f"the loaded state is bit-identical {layouts}, and the next step is the same",
        "different after loading: "
        + format_first([f"{fault.part} ({fault.axis})" for fault in faults]),
        next_loss_gap=gap,
    )


def _find_differences(saved: StateTensors, loaded: StateTensors, axis: str) -> list[FaultLocation]:
    """Return the tensors that differ; empty on ranks other than 0."""
    return [
        FaultLocation(f"{key}/{name}", axis)
        for key, tensors in saved.items()
        for name, values in tensors.items()
        if not np.array_equal(values, loaded[key][name])
    ]
