"""Behavior of neuronx-distributed that the engine relies on, compared with plain PyTorch.

Tests with `torch.equal` use small integers, so sums are exact in every order and dtype; the others
state a tolerance. Activations are [batch, sequence, hidden].
"""

import dataclasses
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_mesh_coordinates
from tests.nxd.numbers import linear, small_integers
from tests.nxd.support.ranks import MODES, require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()

BATCH, LENGTH, HIDDEN = 2, 4, 6


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_column_parallel_linear_shards_rows(mode: str, sequence_parallel: bool) -> None:
    x, weight = small_integers(BATCH, LENGTH, HIDDEN), small_integers(8, HIDDEN)
    grad = small_integers(BATCH, LENGTH, 8)
    found = run(2, "layers.column", x, weight, grad, sequence_parallel, {}, mode=mode)
    outputs, input_grads, weights, weight_grads = zip(*found, strict=True)
    output, input_grad, weight_grad = linear(x, weight, grad)
    assert torch.equal(torch.cat(outputs, -1), output)
    assert torch.equal(torch.cat(weights), weight)
    assert torch.equal(torch.cat(weight_grads), weight_grad)
    if sequence_parallel:
        assert torch.equal(torch.cat(input_grads, 1), input_grad)
    else:
        assert all(torch.equal(local, input_grad) for local in input_grads)


def test_stride_2_shards_both_halves() -> None:
    """Each rank has the matching rows of gate and up, which it multiplies."""
    x, weight = small_integers(BATCH, LENGTH, HIDDEN), small_integers(8, HIDDEN)
    grad = small_integers(BATCH, LENGTH, 8)
    found = run(2, "layers.column", x, weight, grad, False, {"stride": 2})
    gate, up = weight.chunk(2)
    for rank, (_, _, local, _) in enumerate(found):
        assert torch.equal(local, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_row_parallel_linear_shards_columns(mode: str, sequence_parallel: bool) -> None:
    x, weight = small_integers(BATCH, LENGTH, 8), small_integers(HIDDEN, 8)
    grad = small_integers(BATCH, LENGTH, HIDDEN)
    found = run(2, "layers.row", x, weight, grad, sequence_parallel, mode=mode)
    outputs, input_grads, weights, weight_grads = zip(*found, strict=True)
    output, input_grad, weight_grad = linear(x, weight, grad)
    assert torch.equal(torch.cat(input_grads, -1), input_grad)
    assert torch.equal(torch.cat(weights, 1), weight)
    assert torch.equal(torch.cat(weight_grads, 1), weight_grad)
    if sequence_parallel:
        assert torch.equal(torch.cat(outputs, 1), output)
    else:
        assert all(torch.equal(local, output) for local in outputs)


def _embedding(ids: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the weight gradient."""
    local = weight.clone().requires_grad_()
    output = functional.embedding(ids, local)
    output.backward(grad)
    return output.detach(), local.grad


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_parallel_embedding_shards_rows(mode: str, scattered: bool) -> None:
    """Use NxD's reduce-scatter for sequence parallelism along dimension 1."""
    ids, weight = torch.tensor([[0, 5, 2, 3], [4, 4, 1, 0]]), small_integers(6, HIDDEN)
    grad = small_integers(BATCH, LENGTH, HIDDEN)
    options = {"collect_output": False} if scattered else {}
    found = run(2, "layers.embedding", ids, weight, grad, scattered, options, mode=mode)
    outputs, weights, weight_grads = zip(*found, strict=True)
    output, weight_grad = _embedding(ids, weight, grad)
    assert torch.equal(torch.cat(weights), weight)
    assert torch.equal(torch.cat(weight_grads), weight_grad)
    if scattered:
        assert torch.equal(torch.cat(outputs, 1), output)
    else:
        assert all(torch.equal(local, output) for local in outputs)


def test_parallel_embedding_with_sequence_dimension_does_not_reduce() -> None:
    """parallel_layers/layers.py:369: with sequence_dimension=1, a rank returns the full sequence,
    with zeros for the rows of other ranks."""
    ids, weight = torch.tensor([[0, 5, 2, 3], [4, 4, 1, 0]]), small_integers(6, HIDDEN)
    grad = small_integers(BATCH, LENGTH, HIDDEN)
    options = {"sequence_parallel_enabled": True, "sequence_dimension": 1}
    found = run(2, "layers.embedding", ids, weight, grad, False, options)
    for rank, (output, _, _) in enumerate(found):
        held = (ids // 3 == rank)[..., None]
        assert torch.equal(output, functional.embedding(ids, weight) * held)


@pytest.mark.parametrize("mode", MODES)
def test_cross_entropy_per_token_without_ignored_label(mode: str) -> None:
    """Labels of -100 have the gradient of a softmax and a loss without the largest logit, so such
    tokens need a weight of zero. Logits are overwritten. Tolerance 1e-6."""
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
    for local in losses:
        torch.testing.assert_close(local, loss, **close)
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
def test_kv_head_gradients_are_summed_over_replicas(platform: str, mode: str, fused: bool) -> None:
    """Four ranks, two key/value heads: replicas are strided on trn1 and adjacent on trn2. Each
    replica has the gradient of the group, and the input gradient contains each head once."""
    x = small_integers(BATCH, LENGTH, HIDDEN)
    weights = tuple(small_integers(n, HIDDEN, seed=i) for i, n in enumerate((16, 4, 4)))
    shape = (BATCH, LENGTH)
    grads = [tuple(small_integers(*shape, n, seed=r) for n in (4, 2, 2)) for r in range(4)]
    arguments = (x, weights, grads, 2, {"fuse_qkv": fused})
    variables = {"NEURON_PLATFORM_TARGET_OVERRIDE": platform}
    found = run(4, "layers.kv_heads", *arguments, mode=mode, **variables)
    heads = {"trn1": [0, 1, 0, 1], "trn2": [0, 0, 1, 1]}[platform]
    assert [of_rank["head"] for of_rank in found] == heads

    x, *local = (tensor.clone().requires_grad_() for tensor in (x, *weights))
    wanted = []
    for rank, head in enumerate(heads):
        places = ((4, rank), (2, head), (2, head))
        outputs = [
            functional.linear(x, w).chunk(n, -1)[i] for w, (n, i) in zip(local, places, strict=True)
        ]
        torch.autograd.backward(outputs, grads[rank])
        wanted.append((outputs, places))
    for of_rank, (outputs, places) in zip(found, wanted, strict=True):
        for got, output in zip(of_rank["outputs"], outputs, strict=True):
            assert torch.equal(got, output)
        weight_grad = [w.grad.chunk(n)[i] for w, (n, i) in zip(local, places, strict=True)]
        assert torch.equal(of_rank["weight_grad"], torch.cat(weight_grad))
        assert torch.equal(of_rank["input_grad"], x.grad)


ADAMW = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _zero(**optimizer_config: Any) -> dict[str, Any]:
    return {"optimizer_config": {"zero_one_enabled": True, **optimizer_config}}


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, torch.zeros(rows - len(tensor), *tensor.shape[1:])])


@pytest.mark.parametrize("mode", MODES)
def test_zero_1_shards_every_parameter_by_rows(mode: str) -> None:
    """Vectors too, with zero padding if the size does not divide the rows. Each rank has the master
    weights and moments of its rows. Weights agree with torch's AdamW to 1e-6."""
    values = [small_integers(5, 3), small_integers(4), small_integers(3)]
    gradients = [
        [[[small_integers(*v.shape, seed=2 * step + rank) for v in values]] for rank in range(2)]
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
            for key, full in {"master": parameter.detach(), **moments}.items():
                wanted = _padded(full, rows).chunk(2)[rank]
                torch.testing.assert_close(shard[key], wanted, rtol=1e-6, atol=0)
            assert shard["step"] == 3
            assert shard["main_grad"] == parameter.shape  # not sharded


@pytest.mark.parametrize("mode", MODES)
def test_zero_1_accumulates_in_fp32(mode: str) -> None:
    """Sum gradients of 1 and 2**-9, which round to 1 in bf16. Without clipping there is no norm."""
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


def test_master_weights_are_float64_with_xla_downcast_bf16() -> None:
    """Under XLA_DOWNCAST_BF16=1, torch's fp32 is bf16 on the device, and torch's double is fp32."""
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
def test_zero_1_shards_load_in_another_optimizer(mode: str) -> None:
    """Copy master weights, moments and learning rate; weights are those of one run bitwise."""
    values = [small_integers(5, 3), small_integers(3)]
    others = [value + 1 for value in values]
    gradients = [[small_integers(*v.shape, seed=step) for v in values] for step in range(3)]
    configuration = _zero(grad_clipping=False)
    arguments = (values, others, gradients, configuration, ADAMW)
    per_rank = [[[step], [step]] for step in gradients]
    uninterrupted = (values, per_rank, configuration, "AdamW", ADAMW, {})
    full = run(2, "optimizer.steps", *uninterrupted, mode=mode)[0]["weights"]
    for weights in run(2, "optimizer.restored", *arguments, mode=mode):
        for local, wanted in zip(weights, full, strict=True):
            assert torch.equal(local, wanted)


@pytest.mark.parametrize("zero", [False, True])
def test_infinite_grad_clip_only_computes_the_norm(zero: bool) -> None:
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
def test_gradients_are_averaged_before_norm_and_clipping(mode: str, zero: bool) -> None:
    """Require the norm of the mean over ranks before clipping; as in torch, the clipped norm is
    below the limit by 1e-6 of the norm."""
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
def test_norm_gradients_are_summed_over_sequence_parallel_ranks(mode: str, zero: bool) -> None:
    """step() sums gradients of marked parameters if this is enabled; the norm counts them once."""
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
def test_activation_checkpointing_changes_no_result(mode: str) -> None:
    x, weight = small_integers(BATCH, LENGTH, HIDDEN), small_integers(8, HIDDEN)
    grad = small_integers(BATCH, LENGTH, 8)
    _, input_grad, weight_grad = linear(x, weight, grad)
    found = run(2, "layers.recomputed", x, weight, grad, mode=mode)
    for rank, (own_input_grad, own_weight_grad, num_forwards) in enumerate(found):
        assert torch.equal(own_input_grad, input_grad)
        assert torch.equal(own_weight_grad, weight_grad.chunk(2)[rank])
        assert num_forwards == 2


def _peers(axis: str, degrees: ParallelDegrees) -> list[list[int]]:
    """Return the groups of ranks along an axis of hlat's mesh."""
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
def test_groups_equal_hlats_mesh(degrees: ParallelDegrees, platform: str) -> None:
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
def test_groups_of_node_topology_differ_from_hlats_mesh(
    platform: str, tp: int, lnc: int, processes_per_node: int, first: list[int]
) -> None:
    """On two nodes, NxD groups ranks that the topology connects."""
    variables = {
        "NEURON_PLATFORM_TARGET_OVERRIDE": platform,
        "LOCAL_WORLD_SIZE": str(processes_per_node),
    }
    (found,) = run(1, "groups.along_axes", 2 * processes_per_node, tp, 1, lnc, **variables)
    assert found["tp"][0] == first
