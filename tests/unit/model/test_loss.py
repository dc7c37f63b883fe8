"""The chunked head and loss, compared with torch on all logits in double precision."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding

from hlat.model import loss
from hlat.model.loss import IGNORE_INDEX, build_next_token_targets, linear_cross_entropy

VOCABULARY = 131
SIZES = {"one chunk": 512, "several": 7, "a row each": 1}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(loss, "logit_chunk_size", lambda _: request.param)
    return request.param


@pytest.fixture(params=["softmax", "rows"])
def logit_kernel(request, monkeypatch) -> str:
    """Select the kernel of CPUs or that of other devices."""
    if request.param == "rows":
        monkeypatch.setattr(loss, "_select_logit_kernel", lambda *_: loss._logits_to_grad_)
    return request.param


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(3, 11, 24).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, 24).mul(0.3).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (3, 11))
    targets[:, -1] = IGNORE_INDEX
    targets[1, 3:6] = IGNORE_INDEX
    return x, head, targets


def expected(x: Tensor, head: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, ...]:
    x, head = (tensor.detach().double().requires_grad_() for tensor in (x, head))
    value = cross_entropy((x @ head.t()).flatten(0, 1), targets.flatten(), reduction="sum") * scale
    return value.detach(), *torch.autograd.grad(value, (x, head))


def error(result: Tensor, wanted: Tensor) -> float:
    return float((result.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scale", [1.0, 1 / 29])
@pytest.mark.usefixtures("chunk", "logit_kernel")
def test_loss_and_gradients_in_fp32(scale) -> None:
    x, head, targets = example()
    result = linear_cross_entropy(x, head, targets, scale)
    result.backward()
    wanted = expected(x, head, targets, scale)
    for one, other in zip((result, x.grad, head.grad), wanted, strict=True):
        assert error(one.detach(), other) < 1e-6


@pytest.mark.usefixtures("chunk", "logit_kernel")
def test_bf16_is_accumulated_in_fp32_if_configured() -> None:
    x, head, targets = example(torch.bfloat16)
    scale = 1 / 29
    errors = {}
    for fp32 in (True, False):
        x.grad = head.grad = None
        result = linear_cross_entropy(x, head, targets, scale, fp32)
        result.backward()
        assert result.dtype == torch.float32
        assert x.grad.dtype == head.grad.dtype == torch.bfloat16
        wanted = expected(x, head, targets, scale)
        errors[fp32] = [
            error(a.detach(), b) for a, b in zip((result, x.grad, head.grad), wanted, strict=True)
        ]
    assert errors[True][0] < 3e-4
    assert max(errors[True][1:]) < 4e-3
    assert max(errors[False]) < 2e-2
    assert errors[True][2] < errors[False][2]


def test_gradients_are_scaled_by_the_upstream_gradient() -> None:
    x, head, targets = example()
    (linear_cross_entropy(x, head, targets) * 3).backward()
    for result, wanted in zip(
        (x.grad, head.grad), expected(x, head, targets, 3.0)[1:], strict=True
    ):
        assert error(result, wanted) < 1e-6


def test_a_tied_embedding_gets_both_gradients() -> None:
    weight = torch.randn(VOCABULARY, 24).requires_grad_()
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    targets = build_next_token_targets(tokens)
    linear_cross_entropy(embedding(tokens, weight), weight, targets).backward()
    reference = weight.detach().double().requires_grad_()
    logits = embedding(tokens, reference) @ reference.t()
    cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    assert error(weight.grad, reference.grad) < 1e-6


@pytest.mark.usefixtures("logit_kernel")
def test_no_gradients_are_computed_under_no_grad(monkeypatch) -> None:
    x, head, targets = example()
    for name in ("_exp_to_grad_", "_add_matmul_"):
        monkeypatch.setattr(loss, name, None)
    monkeypatch.setattr(torch, "mul", None)
    with torch.no_grad():
        result = linear_cross_entropy(x, head, targets)
    assert error(result, expected(x, head, targets, 1.0)[0]) < 1e-6


def test_logits_are_computed_in_chunks(monkeypatch) -> None:
    monkeypatch.setattr(loss, "logit_chunk_size", lambda _: 4)
    x, head, targets = example()
    seen = []
    passes = loss._logits_to_grad_by_softmax_
    monkeypatch.setattr(
        loss,
        "_logits_to_grad_by_softmax_",
        lambda logits, *rest: (seen.append(tuple(logits.shape)), passes(logits, *rest))[1],
    )
    linear_cross_entropy(x, head, targets).backward()
    assert seen == [(4, VOCABULARY)] * 8 + [(1, VOCABULARY)]


@pytest.mark.usefixtures("chunk", "logit_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_with_zero_probability_have_a_finite_loss(dtype) -> None:
    x, head, targets = example(dtype)
    with torch.no_grad():
        x *= 60
    result = linear_cross_entropy(x, head, targets)
    result.backward()
    wanted = expected(x, head, targets, 1.0)
    assert wanted[0] / (targets != IGNORE_INDEX).sum() > 200
    for one, other in zip((result, x.grad, head.grad), wanted, strict=True):
        assert error(one.detach(), other) < (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.usefixtures("logit_kernel")
def test_ignored_targets_have_zero_loss_and_gradient() -> None:
    x, head, _ = example()
    result = linear_cross_entropy(x, head, torch.full((3, 11), IGNORE_INDEX))
    result.backward()
    assert result == 0.0
    assert not x.grad.any()
    assert not head.grad.any()


LOGIT_KERNELS = {  # by dtype of x, that of the softmax, and the backend of torch.compile
    (torch.float32, torch.float32, None): "_logits_to_grad_by_softmax_",
    (torch.float32, torch.float32, "inductor"): "_logits_to_grad_by_softmax_",
    (torch.bfloat16, torch.bfloat16, "inductor"): "_logits_to_grad_by_softmax_",
    (torch.bfloat16, torch.float32, None): "_logits_to_grad_by_softmax_",
    (torch.bfloat16, torch.float32, "inductor"): "compiled",
}


@pytest.mark.parametrize("dtypes", LOGIT_KERNELS)
def test_the_cpu_uses_the_faster_kernel(monkeypatch, dtypes) -> None:
    monkeypatch.setattr(loss, "_compile_logits_to_grad_", lambda backend: "compiled")
    narrow, wide, backend = dtypes
    result = loss._select_logit_kernel(
        torch.empty(1, 1, dtype=narrow), wide, backend, loss._Logits(loss.FULL_VOCAB, None, 0.0)
    )
    assert getattr(result, "__name__", result) == LOGIT_KERNELS[dtypes]
    part = loss.VocabShard(0, lambda tensor: tensor.unsqueeze(0), 7)
    for options in (
        loss._Logits(part, None, 0.0),
        loss._Logits(loss.FULL_VOCAB, 30.0, 0.0),
        loss._Logits(loss.FULL_VOCAB, None, 1e-4),
    ):
        result = loss._select_logit_kernel(torch.empty(1, 1, dtype=narrow), wide, backend, options)
        assert result is loss._logits_to_grad_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "z_loss"), [(3.0, 0.0), (None, 0.1), (3.0, 0.1)])
def test_softcap_and_z_loss_against_autograd(dtype, softcap, z_loss) -> None:
    torch.manual_seed(0)
    x, head = torch.randn(2, 300, 8), torch.randn(40, 8)
    targets = torch.randint(0, 40, (2, 300))
    targets[:, ::7] = IGNORE_INDEX
    x, head = (t.to(dtype).requires_grad_() for t in (x, head))
    ours = linear_cross_entropy(x, head, targets, 0.01, softcap=softcap, z_loss=z_loss)
    ours_x, ours_head = torch.autograd.grad(ours, (x, head))
    logits = (x @ head.t()).double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    is_target = targets != IGNORE_INDEX
    objective = nats + z_loss * logits.logsumexp(-1)[is_target].square().sum()
    expected_x, expected_head = torch.autograd.grad(objective * 0.01, (x, head))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert abs(ours.item() / (nats.item() * 0.01) - 1) < tolerance
    for result, expected in ((ours_x, expected_x), (ours_head, expected_head)):
        assert (result - expected).norm() / expected.norm() < tolerance


def test_targets_are_the_next_tokens() -> None:
    tokens = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]], dtype=torch.int32)
    assert build_next_token_targets(tokens).tolist() == [
        [1, 4, 1, IGNORE_INDEX],
        [9, 2, 6, IGNORE_INDEX],
    ]


def test_the_first_token_of_a_document_is_no_target() -> None:
    tokens = torch.tensor([[3, 1, 4, 1]])
    documents = torch.tensor([[0, 0, 1, 2]])
    assert build_next_token_targets(tokens, documents).tolist() == [
        [1, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    ]


@pytest.mark.filterwarnings("ignore")  # several warnings of torch
@pytest.mark.slow  # TorchInductor compiles a kernel
@pytest.mark.parametrize("fp32", [True, False])
def test_compiled_passes_agree(monkeypatch, fp32) -> None:
    results = []
    for passes in (loss._logits_to_grad_, loss._compile_logits_to_grad_("inductor")):
        monkeypatch.setattr(loss, "_select_logit_kernel", lambda *_, passes=passes: passes)
        torch.manual_seed(0)
        x, head, targets = example(torch.bfloat16)
        result = linear_cross_entropy(x, head, targets, 1 / 29, fp32)
        results.append((result.detach(), *torch.autograd.grad(result, (x, head))))
    for one, other in zip(*results, strict=True):
        assert error(one, other) < (1e-3 if fp32 else 1e-2)
