"""Attention kernels equal softmax attention with a mask, in fp64, and use memory linear in length.

The kernels of a CPU are compared with their gradients. FlexAttention has no backward on a CPU.
"""

# ruff: noqa: N812

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from hlat.model import flex_attention as flex_module
from hlat.model.attention_kernels import KeyRange, attend, build_masks, compute_document_starts
from hlat.model.flex_attention import attend_flex, build_block_mask

FP32_TOLERANCE = 1e-5
"""Largest error relative to the largest element of the tensor, or to 1 if that is smaller."""
FP32_TOLERANCES = (2e-6, 2e-5)
"""The same for outputs and gradients of random cases. With window=1 the gradients of queries and keys are differences
of equal sums of head_dim products. 400 cases: at most 8e-7 and 8e-6; one case of hypothesis: 1.01e-5."""
BF16_TOLERANCE = 2e-2
"""The same in bf16, of which a unit in the last place is 2^-8 = 4e-3."""
FUSED_BF16_TOLERANCE = 4e-2
"""The same for PyTorch's fused kernel: its backward pass multiplies the output, rounded to bf16, by the gradient, and
adds up head_dim such products. 700 random cases: at most 0.022, and 0.012 for the kernels of hlat."""

ignore_deprecation = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
compile_together = pytest.mark.xdist_group("compile")
"""For one process, because its first compilation takes many seconds."""
"""Ignore a warning about torch.jit that TorchInductor causes in torch itself."""


@dataclass(frozen=True)
class Case:
    """Attention settings and the shape of the inputs."""

    num_rows: int = 2
    num_groups: int = 2
    queries_per_group: int = 2
    head_dim: int = 16
    num_tokens: int = 300
    document_length: int | None = None
    window: int | None = None
    scale: float = 0.3
    softcap: float | None = None
    has_sinks: bool = False
    seed: int = 0

    @property
    def is_causal_only(self) -> bool:
        """True if PyTorch's fused kernel computes the case."""
        is_range_full = self.document_length is None and (self.window or 400) >= self.num_tokens
        return is_range_full and self.softcap is None and not self.has_sinks

    def build_inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return q, k, v and the sinks."""
        generator = torch.Generator().manual_seed(self.seed)
        num_heads = self.num_groups * self.queries_per_group
        tensors = [
            torch.randn(self.num_rows, self.num_tokens, heads, self.head_dim, generator=generator)
            for heads in (num_heads, self.num_groups, self.num_groups)
        ]
        inputs = [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in tensors]
        if self.has_sinks:
            sinks_N = torch.randn(num_heads, generator=generator).to(dtype)
            inputs.append(sinks_N.requires_grad_())
        return inputs

    def build_document_ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = self.num_rows, self.num_tokens
        assert self.document_length is not None
        return (torch.rand(shape, generator=generator) * self.document_length < 1).cumsum(1)

    def build_key_range(self) -> KeyRange | None:
        if self.document_length is None:
            return None
        return KeyRange(compute_document_starts(self.build_document_ids()))

    def build_mask(self) -> Tensor:
        """Return the boolean mask [B, S, S] of queries over keys."""
        distance_SS = torch.arange(self.num_tokens)[:, None] - torch.arange(self.num_tokens)
        mask_SS = (distance_SS >= 0) & (distance_SS < (self.window or self.num_tokens))
        if self.document_length is None:
            return mask_SS.unsqueeze(0)
        ids_BS = self.build_document_ids()
        return mask_SS & (ids_BS.unsqueeze(2) == ids_BS.unsqueeze(1))

    def attend(self, *inputs: Tensor, key_range: KeyRange | None = None) -> Tensor:
        q, k, v, *sinks = inputs
        key_range = key_range or self.build_key_range()
        sinks_N = sinks[0] if sinks else None
        return attend(q, k, v, self.scale, key_range, self.window, self.softcap, sinks_N)

    def attend_naively(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute attention with one matrix of queries over keys per head."""
        q, k, v, *sinks = inputs
        k, v = (x.repeat_interleave(self.queries_per_group, 1) for x in (k, v))
        scores = torch.einsum("bnsd,bnkd->bnsk", q, k) * self.scale
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        mask = self.build_mask() if mask is None else mask
        weights = scores.exp() * mask.unsqueeze(1)
        total = weights.sum(-1, keepdim=True)
        if sinks:
            total = total + sinks[0].exp().view(1, -1, 1, 1)
        return torch.einsum("bnsk,bnkd->bnsd", weights / total, v)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    limit = tolerance * max(1.0, expected.abs().max().item())
    assert (actual.double() - expected).abs().max().item() <= limit


def compute_gradients(output: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(output.shape, generator=generator).bfloat16().to(output.dtype)
    return torch.autograd.grad(output, inputs, grad)


def assert_equals_reference(
    case: Case, dtype: torch.dtype, tolerance: float, gradient_tolerance: float
) -> None:
    inputs = case.build_inputs(dtype)
    references = [x.detach().double().requires_grad_() for x in inputs]
    actual, expected = case.attend(*inputs), case.attend_naively(*references)
    assert actual.dtype is dtype
    assert_close(actual, expected, tolerance)
    gradients = zip(
        compute_gradients(actual, inputs), compute_gradients(expected, references), strict=True
    )
    for gradient, reference in gradients:
        assert gradient.dtype is dtype
        assert_close(gradient, reference, gradient_tolerance)


cases = st.builds(
    Case,
    num_rows=st.integers(1, 3),
    num_groups=st.integers(1, 3),
    queries_per_group=st.integers(1, 3),
    head_dim=st.sampled_from([1, 7, 16, 33, 64]),
    num_tokens=st.integers(1, 400),
    document_length=st.sampled_from([None, 2, 30, 300]),
    window=st.sampled_from([None, 1, 9, 127, 128, 200]),
    scale=st.sampled_from([0.1, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 9),
)


@given(cases)
@settings(max_examples=60)
def test_outputs_and_gradients_equal_the_reference(case: Case) -> None:
    assert_equals_reference(case, torch.float32, *FP32_TOLERANCES)


@given(cases)
@settings(max_examples=15)
def test_outputs_and_gradients_equal_the_reference_in_bf16(case: Case) -> None:
    tolerance = FUSED_BF16_TOLERANCE if case.is_causal_only else BF16_TOLERANCE
    assert_equals_reference(case, torch.bfloat16, tolerance, tolerance)


@pytest.mark.slow  # computes each output twice per input element
def test_gradients_equal_finite_differences() -> None:
    case = Case(1, 1, 2, 3, 9, document_length=5, window=4, softcap=1.5, has_sinks=True)
    assert torch.autograd.gradcheck(case.attend, case.build_inputs(torch.float64))


@pytest.mark.parametrize("queries_per_group", [1, 2])
@pytest.mark.parametrize("window", [None, 300, 1000])
def test_plain_attention_is_bit_identical_to_torch(
    queries_per_group: int, window: int | None
) -> None:
    case = Case(queries_per_group=queries_per_group, window=window, scale=1 / math.sqrt(16))
    q, k, v = inputs = case.build_inputs()
    is_gqa = queries_per_group > 1
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_gqa)
    actual = case.attend(*inputs)
    assert torch.equal(actual, expected)
    gradients = zip(
        compute_gradients(actual, inputs), compute_gradients(expected, inputs), strict=True
    )
    assert all(torch.equal(*pair) for pair in gradients)


def test_documents_of_a_row_are_independent() -> None:
    case = Case(num_rows=1, document_length=40, seed=1)
    q, k, v = case.build_inputs()
    starts = compute_document_starts(case.build_document_ids())[0].unique().tolist()
    assert len(starts) > 1
    packed = case.attend(q, k, v)
    for begin, end in zip(starts, [*starts[1:], case.num_tokens], strict=True):
        document = [x[:, :, begin:end] for x in (q, k, v)]
        separate = attend(*document, case.scale)
        torch.testing.assert_close(packed[:, :, begin:end], separate)


@pytest.mark.slow  # compiles
@compile_together
@ignore_deprecation
def test_document_starts() -> None:
    document_ids_BS = torch.tensor([[0, 0, 3, 3, 0], [5, 6, 6, 6, 7]])
    expected = torch.tensor([[0, 0, 2, 2, 4], [0, 1, 1, 1, 4]])
    assert torch.equal(compute_document_starts(document_ids_BS), expected)
    compiled = torch.compile(compute_document_starts, fullgraph=True)
    assert torch.equal(compiled(document_ids_BS), expected)


ALL_FEATURES = [
    Case(document_length=60),
    Case(window=40),
    Case(document_length=60, window=40, softcap=2.0),
    Case(document_length=60, window=40, has_sinks=True),
]


def run_checkpointed(case: Case, key_range: KeyRange | None, *inputs: Tensor) -> Tensor:
    def forward(*inputs: Tensor) -> Tensor:
        return case.attend(*inputs, key_range=key_range)

    output: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


@pytest.mark.parametrize("case", ALL_FEATURES)
def test_activation_checkpointing(case: Case) -> None:
    inputs, key_range = case.build_inputs(), case.build_key_range()
    expected = compute_gradients(case.attend(*inputs), inputs)
    actual = compute_gradients(run_checkpointed(case, key_range, *inputs), inputs)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.slow  # compiles
@compile_together
@ignore_deprecation
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("case", ALL_FEATURES)
def test_compiled(case: Case, checkpointed: bool) -> None:
    def forward(key_range: KeyRange | None, *inputs: Tensor) -> Tensor:
        inputs = (inputs[0] * 2, *inputs[1:])
        if checkpointed:
            return run_checkpointed(case, key_range, *inputs).sin()
        return case.attend(*inputs, key_range=key_range).sin()

    inputs, key_range = case.build_inputs(), case.build_key_range() or KeyRange()
    expected = forward(key_range, *inputs)
    actual = torch.compile(forward, fullgraph=True)(key_range, *inputs)
    assert_close(actual, expected.double(), FP32_TOLERANCE)
    for gradient, reference in zip(
        compute_gradients(actual, inputs), compute_gradients(expected, inputs), strict=True
    ):
        assert_close(gradient, reference.double(), FP32_TOLERANCE)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.14
@pytest.mark.parametrize("case", ALL_FEATURES)
@pytest.mark.slow_after(2)
def test_operators_satisfy_the_requirements_of_torch(case: Case) -> None:
    q, k, v, *sinks = case.build_inputs()
    key_range = case.build_key_range() or KeyRange()
    arguments = (q, k, v, sinks[0] if sinks else None, key_range.first_BS, case.window)
    operator = torch.ops.hlat.interval_attention.default
    torch.library.opcheck(operator, (*arguments, case.scale, case.softcap))


@given(cases, st.integers(1, 4), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40)
def test_decoding_equals_a_forward_pass(
    case: Case, num_queries: int, gives_positions: bool, dtype: torch.dtype
) -> None:
    num_queries = min(num_queries, case.num_tokens)
    with torch.inference_mode():
        q, k, v, *sinks = (x.detach() for x in case.build_inputs(dtype))
        begin = case.num_tokens - num_queries
        expected = case.attend_naively(*(x.double() for x in (q, k, v, *sinks)))[:, :, begin:]
        key_range = case.build_key_range()
        last_BS = torch.arange(begin, case.num_tokens).expand(case.num_rows, -1)
        if key_range is not None and key_range.first_BS is not None:
            key_range = KeyRange(key_range.first_BS[:, begin:], last_BS)
        elif gives_positions:
            key_range = KeyRange(None, last_BS)
        actual = case.attend(q[:, :, begin:], k, v, *sinks, key_range=key_range)
    tolerance = FP32_TOLERANCE if dtype is torch.float32 else BF16_TOLERANCE
    assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("case", [Case(window=20), Case(window=20, softcap=2.0, has_sinks=True)])
def test_decoding_sequences_of_different_lengths(case: Case) -> None:
    q, k, v, *sinks = case.build_inputs()
    last_BS = torch.tensor([[100], [299]])
    queries = torch.cat([q[row : row + 1, :, last] for row, last in enumerate([[100], [299]])])
    key_range = KeyRange(None, last_BS)
    shared = build_masks(key_range, [None, case.window], (2, 1, case.num_tokens), q.dtype, q.device)
    expected = case.attend_naively(*(x.double() for x in (q, k, v, *sinks)))
    for actual in (
        case.attend(queries, k, v, *sinks, key_range=key_range),
        case.attend(queries, k, v, *sinks, key_range=shared),
    ):
        assert_close(actual[0, :, 0], expected[0, :, 100], FP32_TOLERANCE)
        assert_close(actual[1, :, 0], expected[1, :, 299], FP32_TOLERANCE)


def test_masks_are_built_only_for_kernels_that_read_one() -> None:
    starts, positions = KeyRange(torch.zeros(1, 4, dtype=torch.int64)), torch.full((1, 4), 8)
    like = torch.float32, torch.device("cpu")
    assert build_masks(None, [None, 2], (1, 4, 4), *like) is None
    assert build_masks(starts, [None, 2], (1, 4, 4), *like) is starts
    assert build_masks(None, [None], (1, 1, 9), *like) is None
    decoding = build_masks(KeyRange(None, positions), [None, 2, 9], (1, 4, 9), *like)
    assert decoding is not None
    assert set(decoding.masks) == {None, 2}


@pytest.fixture
def _eager_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_compile_flex_attention", lambda: flex_attention)


def compute_bounds(case: Case) -> tuple[Tensor, Tensor]:
    """Return the first and the last key of each query, [B, S], from the mask."""
    mask_BSS = case.build_mask().expand(case.num_rows, -1, -1).int()
    num_tokens = case.num_tokens
    return mask_BSS.argmax(-1), num_tokens - 1 - mask_BSS.flip(-1).argmax(-1)


@pytest.mark.slow  # 8 s: compiles kernels
@pytest.mark.usefixtures("_eager_flex_attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(cases)
@settings(max_examples=30)
def test_flex_attention_equals_the_reference(case: Case) -> None:
    q, k, v, *sinks = (x.detach() for x in case.build_inputs())
    block_mask = build_block_mask(*compute_bounds(case), case.num_tokens)
    actual = attend_flex(q, k, v, block_mask, case.scale, case.softcap, sinks[0] if sinks else None)
    assert_close(actual, case.attend_naively(*(x.double() for x in (q, k, v, *sinks))), 1e-5)


@given(cases)
@settings(max_examples=60)
def test_block_mask_lists_the_blocks_of_the_mask(case: Case) -> None:
    """Eager FlexAttention ignores the listed blocks, so compare them with the mask."""
    block_mask = build_block_mask(*compute_bounds(case), case.num_tokens)
    num_blocks = -(-case.num_tokens // 128)
    padding = (0, num_blocks * 128 - case.num_tokens) * 2
    mask = F.pad(case.build_mask().expand(case.num_rows, -1, -1), padding)
    visible = mask.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).transpose(2, 3)
    is_any, is_full = visible.flatten(-2).any(-1), visible.flatten(-2).all(-1)
    is_partial = list_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, like=is_any)
    assert torch.equal(is_partial, is_any & ~is_full)
    full_num_blocks, full_indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    assert full_num_blocks is not None
    assert full_indices is not None
    assert torch.equal(list_blocks(full_num_blocks, full_indices, like=is_any), is_full)


def list_blocks(num_blocks: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """Return the mask [B, query blocks, key blocks] of the listed blocks."""
    listed = torch.zeros_like(like)
    for row, block in torch.cartesian_prod(*(torch.arange(n) for n in like.shape[:2])).tolist():
        listed[row, block, indices[row, 0, block, : num_blocks[row, 0, block]].long()] = True
    return listed


@pytest.mark.slow  # compiles
@compile_together
@ignore_deprecation
@pytest.mark.parametrize("case", [Case(document_length=60, window=40, softcap=2.0)])
def test_flex_attention_compiles_with_a_shared_block_mask(case: Case) -> None:
    q, k, v = (x.detach() for x in case.build_inputs())
    block_mask = build_block_mask(*compute_bounds(case), case.num_tokens)

    def forward(q: Tensor, key_range: KeyRange) -> Tensor:
        mask = key_range.masks[case.window]
        assert not isinstance(mask, Tensor)
        return attend_flex(q * 1, k, v, mask, case.scale, case.softcap, None)

    compiled = torch.compile(forward, fullgraph=True)
    actual = compiled(q, KeyRange(masks={case.window: block_mask}))
    assert_close(actual, case.attend_naively(*(x.double() for x in (q, k, v))), 1e-5)


def peak_memory(work: Callable[[], object]) -> int:
    """Return the largest sum of live bytes that the second call allocates."""
    work()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(1, 1, 2, 16, document_length=500), marks=pytest.mark.slow),
        pytest.param(Case(1, 1, 2, 16, window=500), marks=pytest.mark.slow),
        pytest.param(Case(1, 1, 2, 16, softcap=2.0, has_sinks=True), marks=pytest.mark.slow),
        Case(1, 1, 2, 16, document_length=500, window=700, softcap=2.0),
    ],
)
@pytest.mark.slow
def test_memory_is_linear_in_the_length(case: Case) -> None:
    def measure(num_tokens: int) -> int:
        longer = Case(**{**vars(case), "num_tokens": num_tokens})
        inputs, key_range = longer.build_inputs(), longer.build_key_range()

        def work() -> None:
            compute_gradients(longer.attend(*inputs, key_range=key_range), inputs)

        return peak_memory(work)

    short, long = measure(2048), measure(8192)
    assert long <= 4.5 * short
    assert long < 8192 * 8192  # a boolean mask of queries over keys


@pytest.mark.parametrize(("dtype", "num_heads"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_kernels_of_other_devices_have_grouped_queries_in_bf16_only(
    monkeypatch, dtype, num_heads
) -> None:
    """Given grouped fp32 queries, torch would materialize all scores on a GPU."""
    seen = []

    def record(q_BNSD, k_BGKD, v_BGKD, *, is_causal, scale, enable_gqa):
        seen.append((k_BGKD.shape[1], v_BGKD.shape[1], enable_gqa))
        return q_BNSD

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    q_BNSD = torch.empty(1, 4, 8, 16, dtype=dtype, device="meta")
    k_BGKD = torch.empty(1, 2, 8, 16, dtype=dtype, device="meta")
    attend(q_BNSD, k_BGKD, k_BGKD, 0.25)
    assert seen == [(num_heads, num_heads, num_heads == 2)]
