"""Seven of the ways in which neuronx-distributed 2.29 silently trains wrongly, and ways around them.

A test shows both: it fails when a release of NxD mends the behaviour, and then docs/neuron.md and the
way around can go. Lines are those of release 2.29, below src/neuronx_distributed.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nxd.numbers import linear, whole_numbers
from tests.nxd.support.ranks import MODES, RankError, require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()


def _input_grads(mode: str, sequence_parallel: bool, options: dict[str, Any]) -> Any:
    """Of a bf16 ColumnParallelLinear: what each rank gets, its own part, the sum of the parts."""
    sizes = ((2, 4, 6), (8, 6), (2, 4, 8))
    x, weight, grad = (whole_numbers(*size).bfloat16() for size in sizes)
    found = run(2, "layers.column", x, weight, grad, sequence_parallel, options, mode=mode)
    parts = [g @ w for g, w in zip(grad.chunk(2, -1), weight.chunk(2), strict=True)]
    _, whole, _ = linear(x, weight, grad)
    return [own for _, own, _, _ in found], parts, whole


@pytest.mark.parametrize("mode", MODES)
def test_1_input_gradients_of_bf16_layers_are_not_summed(mode: str) -> None:
    """layers_utils.py:100: the gradient is cast to reduce_dtype, fp32 unless given, and the cast copy
    is what is summed. Around it: give the compute dtype, or cut the sequence."""
    grads, parts, whole = _input_grads(mode, False, {})
    for own, part in zip(grads, parts, strict=True):
        assert torch.equal(own, part)
        assert not torch.equal(own, whole)
    grads, _, whole = _input_grads(mode, False, {"reduce_dtype": torch.bfloat16})
    assert all(torch.equal(own, whole) for own in grads)
    grads, _, whole = _input_grads(mode, True, {})
    assert torch.equal(torch.cat(grads, 1), whole)


@pytest.mark.parametrize("mode", MODES)
def test_2_a_resumed_zero_1_run_goes_on_from_its_initial_weights(mode: str, tmp_path: Path) -> None:
    """trainer/checkpoint.py:894: the optimizer is loaded before the model, and cuts its masters from
    weights that are still the initial ones. Around it: save the masters."""
    initial, other, gradient = (whole_numbers(4, 2, seed=seed) for seed in range(3))
    saved = initial - gradient
    for masters_saved, after in ((False, other - gradient), (True, saved - gradient)):
        folder = str(tmp_path / str(masters_saved))
        arguments = (folder, initial, other, gradient, masters_saved)
        for loaded, trained in run(2, "checkpoint.resumed", *arguments, mode=mode):
            assert torch.equal(loaded, saved)
            assert torch.equal(trained, after)


@pytest.mark.parametrize("mode", MODES)
def test_3_zero_1_clips_at_1_whatever_is_configured(mode: str) -> None:
    """trainer/trainer.py:250: max_grad_norm is not passed on. Around it: pass max_norm too."""

    def clipped(zero: bool, **defaults: float) -> Tensor:
        optimizer_config = {"zero_one_enabled": zero, "grad_clipping": True, "max_grad_norm": 0.5}
        gradients = [[[[torch.tensor([3.0, 4.0])]]] * 2]
        configuration = {"optimizer_config": optimizer_config}
        settings = (configuration, "SGD", {"lr": 1.0, **defaults}, {})
        found = run(2, "optimizer.steps", [torch.zeros(2)], gradients, *settings, mode=mode)
        return found[0]["weights"][0]

    close = {"rtol": 1e-6, "atol": 0.0}
    torch.testing.assert_close(clipped(True), torch.tensor([-0.6, -0.8]), **close)
    torch.testing.assert_close(clipped(True, max_norm=0.5), torch.tensor([-0.3, -0.4]), **close)
    torch.testing.assert_close(clipped(False), torch.tensor([-0.3, -0.4]), **close)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("size", "multiplier", "fused", "counted"), [(2, 1, True, 64 / 2), (4, 2, False, 32 + 2 * 32)]
)
def test_4_the_gradient_norm_is_wrong_with_a_qkv_layer(
    mode: str, size: int, multiplier: int, fused: bool, counted: float
) -> None:
    """64 gradients of one, half of them of keys and values. Fused, the mark of a tensor-parallel
    weight is lost (modules/qkv_linear.py:541) and its squares are divided by tp; not fused, copies of
    a head count each. Around it: marks of one's own."""
    found = run(size, "norms.of_qkv", 4, 2, multiplier, fused, mode=mode)
    for as_it_is, put_right in found:
        assert as_it_is == pytest.approx(math.sqrt(counted), rel=1e-6)
        assert put_right == pytest.approx(8.0, rel=1e-6)


def test_5_copies_of_kv_heads_begin_different_on_trn2() -> None:
    """modules/qkv_linear.py:83 repeats rows instead of heads; trn1's way is right, and trn3 has none.
    Around it: fill them oneself, as test_library.py does."""
    query, key, value = (whole_numbers(n, 4, seed=i) for i, n in enumerate((8, 4, 4)))
    assert len(key.unique(dim=0)) == 4

    def initial(platform: str) -> list[Any]:
        variables = {"NEURON_PLATFORM_TARGET_OVERRIDE": platform}
        return run(4, "layers.kv_initial", (query, key, value), 2, **variables)

    for rank, (own_query, *own) in enumerate(initial("trn1")):
        assert torch.equal(own_query, query.chunk(4)[rank])
        for weight, whole in zip(own, (key, value), strict=True):
            assert torch.equal(weight, whole.chunk(2)[rank % 2])
    for rank, (_, *own) in enumerate(initial("trn2")):
        for weight, whole in zip(own, (key, value), strict=True):
            assert torch.equal(weight, whole[[rank, rank]])
    with pytest.raises(RankError, match="Configure kv weight initialization"):
        initial("trn3")


@pytest.mark.parametrize("mode", MODES)
def test_6_stages_that_share_a_seed_have_the_same_layers(mode: str) -> None:
    """Each stage draws from the same generator. Around it: a seed per stage. Loss and gradients of
    the stack are plain PyTorch's to 1e-5."""
    x, labels = whole_numbers(4, 4), whole_numbers(4, 4, seed=1)
    for seed_per_stage in (0, 100):
        found = run(2, "pipeline.train", 2, x, labels, 5, seed_per_stage, mode=mode)
        names = [f"layers.{stage}.linear.weight" for stage in range(2)]
        first, second = (of["weights"][name] for of, name in zip(found, names, strict=True))
        assert torch.equal(first, second) == (seed_per_stage == 0)
        weights = [weight.clone().requires_grad_() for weight in (first, second)]
        loss = (x @ weights[0].t() @ weights[1].t() - labels).pow(2).mean()
        loss.backward()
        assert found[0]["loss"] is None
        assert found[1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for of_rank, name, weight in zip(found, names, weights, strict=True):
            torch.testing.assert_close(of_rank["grads"][name], weight.grad, rtol=1e-5, atol=1e-5)


def test_7_rms_norm_measures_in_bf16_where_fp32_is_bf16() -> None:
    """modules/rms_norm.py:15 compares XLA_DOWNCAST_BF16, a string, with 1, so that it casts to fp32,
    which is bf16 there. Around it: a norm with a statistic in torch.double. To round once costs at
    most 2**-8."""
    x = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    (found,) = run(1, "norms.rms", x, mode="xla", XLA_DOWNCAST_BF16="1")
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True))
    errors = {name: ((y.double() - exact) / exact).abs().max() for name, y in found.items()}
    assert errors["double"] <= 2.0**-8
    assert errors["nxd"] > 2.0**-8
