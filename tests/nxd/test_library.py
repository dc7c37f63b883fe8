"""What neuronx-distributed does, beside plain PyTorch on the same weights: what the engine relies on.

Where a test compares with `torch.equal` all numbers are small and whole, so that sums are exact in
every order and dtype; elsewhere it states its tolerance. Activations are [batch, sequence, hidden].
"""

import dataclasses
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hlat.parallelism.mesh_coordinates import ParallelDegrees, compute_mesh_coordinates
from tests.nxd.numbers import linear, whole_numbers
from tests.nxd.support.ranks import MODES, require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()

BATCH, LENGTH, HIDDEN = 2, 4, 6


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_column_parallel_layer_is_rows_of_a_linear_one(
    mode: str, sequence_parallel: bool
) -> None:
    x, weight = whole_numbers(BATCH, LENGTH, HIDDEN), whole_numbers(8, HIDDEN)
    grad = whole_numbers(BATCH, LENGTH, 8)
    found = run(2, "layers.column", x, weight, grad, sequence_parallel, {}, mode=mode)
    outputs, input_grads, weights, weight_grads = zip(*found, strict=True)
    output, input_grad, weight_grad = linear(x, weight, grad)
    assert torch.equal(torch.cat(outputs, -1), output)
    assert torch.equal(torch.cat(weights), weight)
    assert torch.equal(torch.cat(weight_grads), weight_grad)
    if sequence_parallel:
        assert torch.equal(torch.cat(input_grads, 1), input_grad)
    else:
        assert all(torch.equal(own, input_grad) for own in input_grads)


def test_with_stride_2_each_rank_has_its_rows_of_both_halves() -> None:
    """So that gate and up of one layer meet on the rank that multiplies them."""
    x, weight = whole_numbers(BATCH, LENGTH, HIDDEN), whole_numbers(8, HIDDEN)
    grad = whole_numbers(BATCH, LENGTH, 8)
    found = run(2, "layers.column", x, weight, grad, False, {"stride": 2})
    gate, up = weight.chunk(2)
    for rank, (_, _, own, _) in enumerate(found):
        assert torch.equal(own, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_parallel_layer_is_columns_of_a_linear_one(
    mode: str, sequence_parallel: bool
) -> None:
    x, weight = whole_numbers(BATCH, LENGTH, 8), whole_numbers(HIDDEN, 8)
    grad = whole_numbers(BATCH, LENGTH, HIDDEN)
    found = run(2, "layers.row", x, weight, grad, sequence_parallel, mode=mode)
    outputs, input_grads, weights, weight_grads = zip(*found, strict=True)
    output, input_grad, weight_grad = linear(x, weight, grad)
    assert torch.equal(torch.cat(input_grads, -1), input_grad)
    assert torch.equal(torch.cat(weights, 1), weight)
    assert torch.equal(torch.cat(weight_grads, 1), weight_grad)
    if sequence_parallel:
        assert torch.equal(torch.cat(outputs, 1), output)
    else:
        assert all(torch.equal(own, output) for own in outputs)


def _embedding(ids: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the weight."""
    own = weight.clone().requires_grad_()
    output = functional.embedding(ids, own)
    output.backward(grad)
    return output.detach(), own.grad


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_parallel_embedding_is_rows_of_a_table(mode: str, scattered: bool) -> None:
    """For sequence parallelism along dimension 1, its sum is left to NxD's reduce-scatter."""
    ids, weight = torch.tensor([[0, 5, 2, 3], [4, 4, 1, 0]]), whole_numbers(6, HIDDEN)
    grad = whole_numbers(BATCH, LENGTH, HIDDEN)
    options = {"collect_output": False} if scattered else {}
    found = run(2, "layers.embedding", ids, weight, grad, scattered, options, mode=mode)
    outputs, weights, weight_grads = zip(*found, strict=True)
    output, weight_grad = _embedding(ids, weight, grad)
    assert torch.equal(torch.cat(weights), weight)
    assert torch.equal(torch.cat(weight_grads), weight_grad)
    if scattered:
        assert torch.equal(torch.cat(outputs, 1), output)
    else:
        assert all(torch.equal(own, output) for own in outputs)


def test_a_parallel_embedding_with_a_sequence_dimension_sums_nothing() -> None:
    """parallel_layers/layers.py:369: given sequence_dimension=1, each rank returns the rows that it
    has and zeros elsewhere, of the whole sequence."""
    ids, weight = torch.tensor([[0, 5, 2, 3], [4, 4, 1, 0]]), whole_numbers(6, HIDDEN)
    grad = whole_numbers(BATCH, LENGTH, HIDDEN)
    options = {"sequence_parallel_enabled": True, "sequence_dimension": 1}
    found = run(2, "layers.embedding", ids, weight, grad, False, options)
    for rank, (output, _, _) in enumerate(found):
        held = (ids // 3 == rank)[..., None]
        assert torch.equal(output, functional.embedding(ids, weight) * held)


@pytest.mark.parametrize("mode", MODES)
def test_the_cross_entropy_is_of_each_token_and_knows_no_ignored_label(mode: str) -> None:
    """A label of -100 loses the largest logit of its token from its loss, and its gradient is a
    whole softmax, so such tokens need a weight of zero. Logits are overwritten. Tolerance 1e-6."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, LENGTH, 10, generator=generator)
    labels = torch.tensor([[1, 9, -100, 5], [0, 4, -100, 7]])
    grad = torch.tensor([[1.0, 0.5, 0.0, 2.0], [1.0, 1.0, 3.0, 1.0]])
    found = run(2, "layers.cross_entropy", logits, labels, grad, mode=mode)
    losses, logits_grads, overwritten = zip(*found, strict=True)
    largest = logits.amax(-1, keepdim=True)
    counted = labels >= 0
    loss = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    loss = torch.where(counted, loss, (logits - largest).logsumexp(-1))
    one_hot = functional.one_hot(labels.clamp(0), 10) * counted[..., None]
    logits_grad = (logits.softmax(-1) - one_hot) * grad[..., None]
    close = {"rtol": 0.0, "atol": 1e-6}
    for own in losses:
        torch.testing.assert_close(own, loss, **close)
    torch.testing.assert_close(torch.cat(logits_grads, -1), logits_grad, **close)
    assert not logits_grads[0][0, 2].any()
    torch.testing.assert_close(torch.cat(overwritten, -1), logits - largest, **close)


@pytest.mark.parametrize(
    ("platform", "mode", "fused"),
    [
        ("trn1", "gloo", True),
        ("trn1", "gloo", False),
        ("trn2", "gloo", True),
        ("trn2", "xla", True),
    ],
)
def test_ranks_of_one_group_share_a_kv_head_and_its_gradient(
    platform: str, mode: str, fused: bool
) -> None:
    """Four ranks, two key/value heads: copies lie strided on trn1 and side by side on trn2. Every
    copy gets the gradient of the whole group, and the input's counts each head once."""
    x = whole_numbers(BATCH, LENGTH, HIDDEN)
    weights = tuple(whole_numbers(n, HIDDEN, seed=i) for i, n in enumerate((16, 4, 4)))
    shape = (BATCH, LENGTH)
    grads = [tuple(whole_numbers(*shape, n, seed=r) for n in (4, 2, 2)) for r in range(4)]
    arguments = (x, weights, grads, 2, {"fuse_qkv": fused})
    variables = {"NEURON_PLATFORM_TARGET_OVERRIDE": platform}
    found = run(4, "layers.kv_heads", *arguments, mode=mode, **variables)
    heads = {"trn1": [0, 1, 0, 1], "trn2": [0, 0, 1, 1]}[platform]
    assert [of_rank["head"] for of_rank in found] == heads

    x, *own = (tensor.clone().requires_grad_() for tensor in (x, *weights))
    wanted = []
    for rank, head in enumerate(heads):
        places = ((4, rank), (2, head), (2, head))
        outputs = [
            functional.linear(x, w).chunk(n, -1)[i] for w, (n, i) in zip(own, places, strict=True)
        ]
        torch.autograd.backward(outputs, grads[rank])
        wanted.append((outputs, places))
    for of_rank, (outputs, places) in zip(found, wanted, strict=True):
        for got, output in zip(of_rank["outputs"], outputs, strict=True):
            assert torch.equal(got, output)
        weight_grad = [w.grad.chunk(n)[i] for w, (n, i) in zip(own, places, strict=True)]
        assert torch.equal(of_rank["weight_grad"], torch.cat(weight_grad))
        assert torch.equal(of_rank["input_grad"], x.grad)


ADAMW = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _zero(**optimizer_config: Any) -> dict[str, Any]:
    return {"optimizer_config": {"zero_one_enabled": True, **optimizer_config}}


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, torch.zeros(rows - len(tensor), *tensor.shape[1:])])


@pytest.mark.parametrize("mode", MODES)
def test_zero_1_cuts_every_parameter_by_rows(mode: str) -> None:
    """Also vectors, with zeros after the last row where rows do not divide; each rank holds masters
    and moments of its rows, and `step` counts steps. Weights agree with torch's AdamW to 1e-6."""
    values = [whole_numbers(5, 3), whole_numbers(4), whole_numbers(3)]
    gradients = [
        [[[whole_numbers(*v.shape, seed=2 * step + rank) for v in values]] for rank in range(2)]
        for step in range(3)
    ]
    arguments = (values, gradients, _zero(grad_clipping=False), "AdamW", ADAMW, {})
    found = run(2, "optimizer.steps", *arguments, mode=mode)

    plain = [value.clone().requires_grad_() for value in values]
    optimizer = torch.optim.AdamW(plain, **ADAMW)
    for (one,), (other,) in gradients:
        for parameter, first, second in zip(plain, one, other, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    for i, (parameter, rows) in enumerate(zip(plain, (6, 4, 4), strict=True)):
        state = optimizer.state[parameter]
        for rank, of_rank in enumerate(found):
            torch.testing.assert_close(of_rank["weights"][i], parameter.detach(), rtol=1e-6, atol=0)
            shard = of_rank["shards"][i]
            moments = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
            for key, whole in {"master": parameter.detach(), **moments}.items():
                wanted = _padded(whole, rows).chunk(2)[rank]
                torch.testing.assert_close(shard[key], wanted, rtol=1e-6, atol=0)
            assert shard["step"] == 3
            assert shard["main_grad"] == parameter.shape  # whole on every rank


@pytest.mark.parametrize("mode", MODES)
def test_zero_1_sums_micro_batches_and_keeps_masters_in_fp32(mode: str) -> None:
    """A gradient of 1 and one of 2**-9 are 1 in bf16 and both in fp32. There is no gradient norm
    without clipping."""
    small = 2.0**-9
    micro_batches = [[torch.tensor([g, 0.0], dtype=torch.bfloat16)] for g in (1.0, small)]
    values = [torch.zeros(2, dtype=torch.bfloat16)]
    arguments = (values, [[micro_batches] * 2], _zero(grad_clipping=False), "SGD", {"lr": 1.0}, {})
    for rank, of_rank in enumerate(run(2, "optimizer.steps", *arguments, mode=mode)):
        (weight,), (shard,) = of_rank["weights"], of_rank["shards"]
        assert weight.dtype is torch.bfloat16
        assert weight.tolist() == [-1.0, 0.0]
        assert shard["master"].dtype is torch.float32
        assert shard["master"].tolist() == [[-1.0 - small], [0.0]][rank]
        assert of_rank["norms"] == [None]


def test_hlats_recipe_keeps_masters_in_what_torch_calls_double() -> None:
    """Under XLA_DOWNCAST_BF16=1 the device holds torch's fp32 in bf16 and torch's double in fp32."""
    small = 2.0**-9
    micro_batches = [[torch.tensor([g, 0.0])] for g in (1.0, small)]
    gradients = [[micro_batches] * 2]
    settings = (_zero(grad_clipping=False), "SGD", {"lr": 1.0}, {})
    arguments = ([torch.zeros(2)], gradients, *settings)
    variables = {"XLA_DOWNCAST_BF16": "1"}
    found = run(2, "optimizer.steps", *arguments, mode="xla", **variables)
    for rank, of_rank in enumerate(found):
        (weight,), (shard,) = of_rank["weights"], of_rank["shards"]
        assert weight.tolist() == [-1.0, 0.0]
        assert shard["master"].dtype is torch.float64
        assert shard["master"].tolist() == [[-1.0 - small], [0.0]][rank]


@pytest.mark.parametrize("mode", MODES)
def test_shards_of_one_zero_1_optimizer_go_on_in_another(mode: str) -> None:
    """Written into its masters and moments, with the learning rate of its groups, to the last bit of
    the uninterrupted run."""
    values = [whole_numbers(5, 3), whole_numbers(3)]
    others = [value + 1 for value in values]
    gradients = [[whole_numbers(*v.shape, seed=step) for v in values] for step in range(3)]
    configuration = _zero(grad_clipping=False)
    arguments = (values, others, gradients, configuration, ADAMW)
    per_rank = [[[step], [step]] for step in gradients]
    uninterrupted = (values, per_rank, configuration, "AdamW", ADAMW, {})
    whole = run(2, "optimizer.steps", *uninterrupted, mode=mode)[0]["weights"]
    for weights in run(2, "optimizer.restored", *arguments, mode=mode):
        for own, wanted in zip(weights, whole, strict=True):
            assert torch.equal(own, wanted)


@pytest.mark.parametrize("zero", [False, True])
def test_a_limit_of_infinity_gives_a_norm_and_clips_nothing(zero: bool) -> None:
    gradients = [[[[torch.tensor([3.0, 4.0])]]] * 2]
    clipping = {"grad_clipping": True, "max_grad_norm": math.inf}
    configuration = {"optimizer_config": {"zero_one_enabled": zero, **clipping}}
    defaults = {"lr": 1.0, **({"max_norm": math.inf} if zero else {})}
    arguments = ([torch.zeros(2)], gradients, configuration, "SGD", defaults, {})
    for of_rank in run(2, "optimizer.steps", *arguments):
        assert of_rank["norms"] == [5.0]
        assert of_rank["weights"][0].tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_averaged_then_measured_then_clipped(mode: str, zero: bool) -> None:
    """The norm is that of the mean over ranks, before clipping; the clipped gradient is 1e-6 of the
    norm short of the limit, as torch's is."""
    gradients = [[[[torch.tensor([6.0, 0.0])]], [[torch.tensor([0.0, 8.0])]]]]
    configuration = {
        "optimizer_config": {"zero_one_enabled": zero, "grad_clipping": True, "max_grad_norm": 1.0}
    }
    arguments = ([torch.zeros(2)], gradients, configuration, "SGD", {"lr": 1.0}, {})
    for of_rank in run(2, "optimizer.steps", *arguments, mode=mode):
        assert of_rank["norms"] == [5.0]
        wanted = torch.tensor([-0.6, -0.8])
        torch.testing.assert_close(of_rank["weights"][0], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_norms_are_summed_over_the_ranks_that_cut_the_sequence(
    mode: str, zero: bool
) -> None:
    """Inside step(), of parameters with the mark, under the setting; and count once in the norm."""
    gradients = [[[[torch.tensor([1.0, 4.0])]], [[torch.tensor([2.0, 0.0])]]]]
    configuration = {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "optimizer_config": {"zero_one_enabled": zero, "grad_clipping": True, "max_grad_norm": 9.0},
    }
    defaults = {"lr": 1.0, **({"max_norm": 9.0} if zero else {})}
    marks = {"sequence_parallel_enabled": True}
    arguments = ([torch.zeros(2)], gradients, configuration, "SGD", defaults, marks)
    for of_rank in run(2, "optimizer.steps", *arguments, mode=mode):
        assert of_rank["norms"] == [5.0]
        assert of_rank["weights"][0].tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_is_recomputed_gives_the_same(mode: str) -> None:
    x, weight = whole_numbers(BATCH, LENGTH, HIDDEN), whole_numbers(8, HIDDEN)
    grad = whole_numbers(BATCH, LENGTH, 8)
    _, input_grad, weight_grad = linear(x, weight, grad)
    found = run(2, "layers.recomputed", x, weight, grad, mode=mode)
    for rank, (own_input_grad, own_weight_grad, num_forwards) in enumerate(found):
        assert torch.equal(own_input_grad, input_grad)
        assert torch.equal(own_weight_grad, weight_grad.chunk(2)[rank])
        assert num_forwards == 2


def _peers(axis: str, degrees: ParallelDegrees) -> list[list[int]]:
    """Ranks that differ along one axis only, by hlat's own mesh."""
    peers = defaultdict(list)
    for rank in range(degrees.world_size):
        peers[dataclasses.replace(compute_mesh_coordinates(rank, degrees), **{axis: 0})].append(
            rank
        )
    return sorted(peers.values())


@pytest.mark.parametrize(
    ("degrees", "platform"),
    [
        (ParallelDegrees(dp=4, tp=8, pp=4), "trn1"),
        (ParallelDegrees(dp=2, tp=32, pp=8), "trn1"),
        (ParallelDegrees(dp=4, tp=8, pp=4), "trn2"),
    ],
)
def test_groups_are_those_of_hlats_mesh(degrees: ParallelDegrees, platform: str) -> None:
    arguments = (degrees.world_size, degrees.tp, degrees.pp, 1)
    variables = {"NEURON_PLATFORM_TARGET_OVERRIDE": platform}
    (found,) = run(1, "groups.along_axes", *arguments, **variables)
    for axis, groups in found.items():
        assert sorted(groups) == _peers(axis, degrees), axis


@pytest.mark.parametrize(
    ("platform", "tp", "lnc", "processes_per_node", "first"),
    [
        ("trn1", 4, 1, 32, [0, 8, 16, 24]),
        ("trn2", 32, 2, 64, [*range(16), *range(48, 64)]),
    ],
)
def test_groups_that_follow_a_nodes_wiring_are_not(
    platform: str, tp: int, lnc: int, processes_per_node: int, first: list[int]
) -> None:
    """Two nodes; NxD puts ranks together that are wired together."""
    variables = {
        "NEURON_PLATFORM_TARGET_OVERRIDE": platform,
        "LOCAL_WORLD_SIZE": str(processes_per_node),
    }
    (found,) = run(1, "groups.along_axes", 2 * processes_per_node, tp, 1, lnc, **variables)
    assert found["tp"][0] == first
