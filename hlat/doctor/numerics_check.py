"""Check that gradient norms over a short run follow those of an fp64 reference."""

from collections.abc import Iterator

import numpy as np
import torch

from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.doctor import reference_model
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result
from hlat.doctor.engine_harness import EngineHarness, sample_batch, sample_weights
from hlat.doctor.optimizer_check import build_torch_adamw

_NUM_STEPS = 12
_MAX_LEARNING_RATE = 1e-3
_TOLERANCES = {Dtype.fp32: 1e-3, Dtype.bf16: 0.05}
"""Maximum relative error of the gradient norm at any step, by the dtype of matmuls."""


def check_numerics(harness: EngineHarness) -> Iterator[CheckResult]:
    """Compare the gradient norm at each step with that of the reference."""
    config = harness.config
    lr = min(config.optimizer.lr, _MAX_LEARNING_RATE)
    harness.load_random_weights()
    norms = [
        harness.train_step(sample_batch(config, seed), lr).grad_norm for seed in range(_NUM_STEPS)
    ]
    if not harness.is_rank0:
        return
    ratios = np.array(norms, np.float64) / _train_fp64_reference(config, lr)
    largest, tolerance = float(np.abs(ratios - 1).max()), _TOLERANCES[config.precision.compute]
    growth = float(ratios[-1] / ratios[0])
    yield build_result(
        "numerics",
        [] if largest <= tolerance else [FaultLocation("grad_norm", "precision")],
        f"over {_NUM_STEPS} steps the gradient norm is that of the fp64 reference to {largest:.1e}",
        f"over {_NUM_STEPS} steps the gradient norm differs from the fp64 reference by "
        f"{largest:.1%} (tolerance {tolerance:.1%}) and grows {growth:.3g} times as much",
        largest=largest,
        growth=growth,
        tolerance=tolerance,
    )


def _train_fp64_reference(config: Config, learning_rate: float) -> list[float]:
    """Train the reference model in fp64; return its gradient norms."""
    weights = {
        name: torch.from_numpy(weight).double().requires_grad_()
        for name, weight in sample_weights(config).items()
    }
    adamw = build_torch_adamw(config, [*weights.values()], learning_rate)
    norms = []
    for seed in range(_NUM_STEPS):
        tokens = sample_batch(config, seed)
        num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
        adamw.zero_grad()
        loss = reference_model.compute_loss_sum(config.model, weights, tokens) / num_targets
        loss.backward()
        max_norm = config.optimizer.grad_clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)))
        adamw.step()
    return norms
