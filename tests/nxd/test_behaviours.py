"""Seven silent training errors of neuronx-distributed 2.29 and their workarounds.

A test shows both. It fails when a release of NxD fixes the error; then remove the workaround and
the entry in docs/neuron.md. Line numbers are of release 2.29, below src/neuronx_distributed.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nxd.numbers import linear, small_integers
from tests.nxd.support.ranks import MODES, RankError, require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()


def _input_grads(mode: str, sequence_parallel: bool, options: dict[str, Any]) -> Any:
    """Return input gradients of a bf16 ColumnParallelLinear, the expected parts and their sum."""
    sizes = ((2, 4, 6), (8, 6), (2, 4, 8))
    x, weight, grad = (small_integers(*size).bfloat16() for size in sizes)
    found = run(2, "layers.column", x, weight, grad, sequence_parallel, options, mode=mode)
    parts = [g @ w for g, w in zip(grad.chunk(2, -1), weight.chunk(2), strict=True)]
    _, full, _ = linear(x, weight, grad)
    return [local for _, local, _, _ in found], parts, full


@pytest.mark.parametrize("mode", MODES)
def test_1_input_gradients_of_bf16_layers_are_not_summed(mode: str) -> None:
    """layers_utils.py:100: the gradient is cast to reduce_dtype, by default fp32, and only the copy
    is summed. Workaround: set reduce_dtype to the compute dtype, or use sequence parallelism."""
    grads, parts, full = _input_grads(mode, False, {})
    for local, part in zip(grads, parts, strict=True):
        assert torch.equal(local, part)
        assert not torch.equal(local, full)
    grads, _, full = _input_grads(mode, False, {"reduce_dtype": torch.bfloat16})
    assert all(torch.equal(local, full) for local in grads)
    grads, _, full = _input_grads(mode, True, {})
    assert torch.equal(torch.cat(grads, 1), full)


@pytest.mark.parametrize("mode", MODES)
def test_2_a_resumed_zero_1_run_starts_from_its_initial_weights(mode: str, tmp_path: Path) -> None:
    """trainer/checkpoint.py:894: the optimizer is loaded before the model, so the master weights
    are shards of the initial weights. Workaround: save the master weights."""
    initial, other, gradient = (small_integers(4, 2, seed=seed) for seed in range(3))
    saved = initial - gradient
    for masters_saved, after in ((False, other - gradient), (True, saved - gradient)):
        folder = str(tmp_path / str(masters_saved))
        arguments = (folder, initial, other, gradient, masters_saved)
        for loaded, trained in run(2, "checkpoint.resumed", *arguments, mode=mode):
            assert torch.equal(loaded, saved)
            assert torch.equal(trained, after)


@pytest.mark.parametrize("mode", MODES)
def test_3_zero_1_ignores_max_grad_norm(mode: str) -> None:
    """trainer/trainer.py:250: max_grad_norm is not passed on. Workaround: pass max_norm too."""

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
    """64 gradients of one, half of them of keys and values. Fused, the tensor-parallel attribute of
    the weight is lost (modules/qkv_linear.py:541) and its squares are divided by tp; not fused,
    each replica of a head is counted. Workaround: set the attributes."""
    found = run(size, "norms.of_qkv", 4, 2, multiplier, fused, mode=mode)
    for as_it_is, put_right in found:
        assert as_it_is == pytest.approx(math.sqrt(counted), rel=1e-6)
        assert put_right == pytest.approx(8.0, rel=1e-6)


def test_5_kv_head_replicas_differ_initially_on_trn2() -> None:
    """modules/qkv_linear.py:83 repeats rows instead of heads; trn1 is correct, trn3 not supported.
    Workaround: initialize the weights as in test_library.py."""
    query, key, value = (small_integers(n, 4, seed=i) for i, n in enumerate((8, 4, 4)))
    assert len(key.unique(dim=0)) == 4

    def initial(platform: str) -> list[Any]:
        variables = {"NEURON_PLATFORM_TARGET_OVERRIDE": platform}
        return run(4, "layers.kv_initial", (query, key, value), 2, **variables)

    for rank, (own_query, *local) in enumerate(initial("trn1")):
        assert torch.equal(own_query, query.chunk(4)[rank])
        for weight, full in zip(local, (key, value), strict=True):
            assert torch.equal(weight, full.chunk(2)[rank % 2])
    for rank, (_, *local) in enumerate(initial("trn2")):
        for weight, full in zip(local, (key, value), strict=True):
            assert torch.equal(weight, full[[rank, rank]])
    with pytest.raises(RankError, match="Configure kv weight initialization"):
        initial("trn3")


@pytest.mark.parametrize("mode", MODES)
def test_6_stages_with_one_seed_have_the_same_layers(mode: str) -> None:
    """Stages use generators with the same seed. Workaround: a seed per stage. Loss and gradients
    agree with plain PyTorch to 1e-5."""
    x, labels = small_integers(4, 4), small_integers(4, 4, seed=1)
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
    """modules/rms_norm.py:15 compares XLA_DOWNCAST_BF16, a string, with 1, so it casts to fp32,
    which is bf16 there. Workaround: a mean square in torch.double. One rounding has an error of at
    most 2**-8."""
    x = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    (found,) = run(1, "norms.rms", x, mode="xla", XLA_DOWNCAST_BF16="1")
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True))
    errors = {name: ((y.double() - exact) / exact).abs().max() for name, y in found.items()}
    assert errors["double"] <= 2.0**-8
    assert errors["nxd"] > 2.0**-8
