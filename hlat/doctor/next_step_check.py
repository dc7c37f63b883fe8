"""Check that the forward pass uses the updated weights on every rank."""

from collections.abc import Iterator

import numpy as np

from hlat.distributed.state_shard import BUFFERS
from hlat.doctor import reference_model, tolerances
from hlat.doctor.check_result import (
    CheckResult,
    FaultLocation,
    build_result,
    format_parallel_axes,
)
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.sampled_inputs import build_masks, sample_batch, sample_documents


def check_next_step(harness: EngineHarness) -> Iterator[CheckResult]:
    """Compare loss and weight norm after an update with those of the gathered weights."""
    config = harness.config
    tokens = sample_batch(config, 3)
    harness.load_random_weights()
    harness.train_step(tokens, 2.0**-6)
    buffers = harness.gather_full_tensors(BUFFERS)  # the second step changes them afterwards
    metrics = harness.train_step(tokens, 0.0)
    weights = harness.gather_full_tensors("weights")
    if not harness.is_rank0:
        return
    masks = build_masks(config, sample_documents(config, tokens))
    loss = reference_model.compute_training_loss(config.model, weights | buffers, tokens, masks)
    norm = float(np.sqrt(sum(np.square(w.astype(np.float64)).sum() for w in weights.values())))
    tolerance = 2 * tolerances.compute_loss_tolerance(config)
    loss_gap = abs(metrics.loss - loss) / loss
    assert metrics.param_norm is not None
    norm_gap = abs(metrics.param_norm - norm) / norm
    faults, axes = [], format_parallel_axes(config)
    if not loss_gap <= tolerance:
        faults.append(FaultLocation("weights that the model reads", axes))
    if not norm_gap <= tolerances.compute_norm_tolerance(config):
        faults.append(FaultLocation("param_norm", axes))
    yield build_result(
        "next step",
        faults,
        f"the loss after an update is that of the updated weights to {loss_gap:.1e}",
        f"the loss after an update is {metrics.loss:.5f}, and {loss:.5f} with the updated "
        f"weights; param_norm is {metrics.param_norm:.5f}, expected {norm:.5f}",
        loss_gap=loss_gap,
        norm_gap=norm_gap,
        tolerance=tolerance,
    )
