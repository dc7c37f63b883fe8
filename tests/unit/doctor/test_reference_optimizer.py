"""The reference optimizer equals torch.optim.AdamW in fp64."""

import numpy as np
import pytest
import torch

from hlat.config.optimizer import OptimizerConfig
from hlat.doctor.reference_optimizer import ReferenceState, update_adamw

SETTINGS = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3)
LEARNING_RATE = 0.05


@pytest.mark.parametrize("shape", [(3, 4), (5,)])
@pytest.mark.parametrize("num_updates", [0, 7])
def test_update_equals_that_of_torch(shape, num_updates) -> None:
    generator = np.random.default_rng(0)
    weight, exp_avg, root, gradient = (generator.standard_normal(shape) for _ in range(4))
    state = ReferenceState(
        {"weights": weight, "exp_avg": exp_avg, "exp_avg_sq": root**2}, num_updates
    )
    updated = update_adamw(SETTINGS, state, gradient, LEARNING_RATE)

    param = torch.from_numpy(weight.copy()).requires_grad_()
    param.grad = torch.from_numpy(gradient)
    adamw = torch.optim.AdamW(
        [param], LEARNING_RATE, (SETTINGS.beta1, SETTINGS.beta2), SETTINGS.eps, 0.3, foreach=False
    )
    adamw.state[param] = {
        "step": torch.tensor(float(num_updates)),
        "exp_avg": torch.from_numpy(exp_avg.copy()),
        "exp_avg_sq": torch.from_numpy(root**2),
    }
    adamw.step()
    assert np.allclose(updated.weights, param.detach().numpy(), rtol=1e-12, atol=1e-15)
    for key in ("exp_avg", "exp_avg_sq"):
        expected = adamw.state[param][key].numpy()
        assert np.allclose(updated.tensors[key], expected, rtol=1e-12, atol=1e-15), key
    assert updated.updates == num_updates + 1


def test_vectors_are_decayed_only_with_decay_norms() -> None:
    settings = OptimizerConfig(lr=0.1, weight_decay=0.5, decay_norms=False)
    for shape, factor in (((2, 2), 0.95), ((2,), 1.0)):
        ones, zeros = np.ones(shape), np.zeros(shape)
        state = ReferenceState({"weights": ones, "exp_avg": zeros, "exp_avg_sq": zeros}, 0)
        updated = update_adamw(settings, state, 0.0, 0.1)
        assert np.allclose(updated.weights, factor), shape
