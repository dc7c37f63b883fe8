"""Checks of the sum of gradients over micro batches and data-parallel ranks.

Of the batch for small gradients, the first micro batch of each rank has a token of which the row in
the head gets a gradient near one; all others have a token that adds less than half the spacing of
bf16 to it. Rounding to nearest in bf16 loses these gradients.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hlat.config.batch import BatchConfig
from hlat.config.precision import Dtype, RoundingMode
from hlat.config.run import Config
from hlat.doctor import reference_model, tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.extension_reference import is_extended
from hlat.doctor.gradient_errors import compute_relative_errors
from hlat.doctor.rounding_statistics import compute_spacing
from hlat.doctor.sampled_inputs import (
    FullTensors,
    build_masks,
    bypass_layers,
    round_to_bf16,
    sample_batch,
    sample_documents,
    sample_weights,
)
from hlat.model.mlp_spec import BalanceScope
from hlat.recovery.preflight_checks import format_first

_NUM_MICRO_BATCHES = 32
"""Minimum number of micro batches of each rank, of which the first has the large gradient."""
_LARGE, _SMALL = 0, 1
"""Tokens with a large and with small gradients."""
_MIN_SHARE = 0.5
"""Minimum share of small gradients in the sum; rounding a large gradient to bf16 once changes it by
up to a quarter."""
_MAX_SPREAD = 3.0
"""Maximum standard deviation of the sums over that of independent roundings; equal random bits in
all micro batches give more than five times as much."""
_MAX_NARROW_SHARE = 0.95
"""Maximum share of sums that are values of bf16; of sums of two such values about half are."""


@dataclass(frozen=True)
class _SmallGradients:
    """Share of small gradients in a sum, and its spread relative to independent roundings."""

    share: float = 1.0
    spread: float = 1.0


def check_accumulation(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check the sums over micro batches: their number, dtype and rounding."""
    if not harness.can_rebuild:
        yield skip_check("accumulation", "engine=nxd builds one model per process")
        return
    depends = harness.config.model.mlp.moe.balance_scope is BalanceScope.micro_batch
    with (
        harness.without_router_losses() if depends else nullcontext(harness) as other,
        other.with_gradient_source() as source,
    ):
        yield from _check_accumulation(source)


def _check_accumulation(harness: EngineHarness) -> Iterator[CheckResult]:
    config = harness.config
    gradients = [_compute_gradients(harness, size) for size in (2, 1)]
    small = _SmallGradients()
    if config.precision.compute_dtype is Dtype.bf16 and not is_extended(config.model, "model.norm"):
        small = _measure_small_gradients(harness)
    if not harness.is_rank0:
        return
    tolerance = 2 * tolerances.compute_gradient_tolerance(config)
    errors = compute_relative_errors(gradients[1], gradients[0])
    wrong = [name for name, error in errors.items() if not error <= tolerance]
    wrong.sort(key=errors.__getitem__, reverse=True)
    largest, comparison = max(errors.values()), "the gradients of half as many micro batches differ"
    problems = dict(_find_problems(config, gradients[1], small))
    messages = [*problems.values()]
    if wrong:
        message = f"{comparison} by up to {largest:.1e} (tolerance {tolerance:.1e})"
        messages.insert(0, f"{message}: {format_first(wrong)}")
    yield build_result(
        "accumulation",
        [FaultLocation(part, "accumulation") for part in [*wrong, *problems]],
        f"{comparison} by at most {largest:.1e}"
        + (f"; {small.share:.0%} of small gradients arrive" if small.share != 1 else ""),
        "; ".join(messages),
        largest=largest,
        tolerance=tolerance,
        small_share=small.share,
    )


def _find_problems(
    config: Config, gradients: FullTensors, small: _SmallGradients
) -> Iterator[tuple[str, str]]:
    """Yield the wrong properties of the sums and their descriptions."""
    precision = config.precision
    is_bf16 = precision.grad_accum_dtype is Dtype.bf16
    is_stochastic = is_bf16 and precision.rounding is RoundingMode.stochastic
    if _expects_wide_sums(config) and _measure_narrow_share(gradients) > _MAX_NARROW_SHARE:
        yield (
            "dtype of the sums",
            "the sums of gradients are values of bf16, although precision.grad_accum_dtype="
            f"{precision.grad_accum_dtype.value} and precision.reduce_dtype="
            f"{precision.reduce_dtype.value}",
        )
    if (is_stochastic or not is_bf16) and not small.share >= _MIN_SHARE:
        yield (
            "rounding of the sums",
            f"{small.share:.0%} of the gradients below half the spacing of bf16 arrive in the sum "
            "over micro batches; it is rounded to nearest in bf16",
        )
    if is_stochastic and not small.spread <= _MAX_SPREAD:
        yield (
            "random bits of micro batches",
            f"rounding errors of the sum over micro batches are {small.spread:.1f} times those of "
            "independent roundings; random bits are shared",
        )


def _compute_gradients(harness: EngineHarness, micro_batch_size: int) -> FullTensors:
    """Return the gradients of a batch in micro batches of a size."""
    config, dp = harness.config, harness.config.parallelism.dp or 1
    global_batch_size = 2 * max(2, config.num_micro_batches) * dp
    batch = replace(
        config.batch, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size
    )
    variant = replace(config, batch=batch)
    with harness.with_config(variant) as other:
        other.load_random_weights()
        return other.step_with_gradients(sample_batch(variant))[1]


def _expects_wide_sums(config: Config) -> bool:
    """Return True if gradients in bf16 are summed in fp32, and the first moments show it."""
    precision = config.precision
    sums = {precision.grad_accum_dtype, precision.reduce_dtype, precision.optimizer_state_dtype}
    return precision.grad_dtype is Dtype.bf16 and sums == {Dtype.fp32}


def _measure_narrow_share(gradients: FullTensors) -> float:
    """Return the share of elements that are values of bf16, up to the error of the clip factor."""
    values = np.concatenate([gradient.ravel() for gradient in gradients.values()])
    values = values[values != 0]
    return float((np.abs(round_to_bf16(values) / values - 1) < 2.0**-20).mean())


def _measure_small_gradients(harness: EngineHarness) -> _SmallGradients:
    """Return what arrives of small gradients in the sum, on rank 0."""
    config, dp = harness.config, harness.config.parallelism.dp or 1
    length = config.batch.sequence_length
    num_micro_batches = config.num_micro_batches * -(
        -_NUM_MICRO_BATCHES // config.num_micro_batches
    )
    variant = replace(config, batch=BatchConfig(num_micro_batches * dp, 1, length))
    tokens = np.full((num_micro_batches * dp, length), _SMALL, np.int32)
    tokens[:dp] = _LARGE
    with harness.with_config(variant) as other:
        weights = _build_weights(variant)
        other.load_weights(weights)
        _, gradients = other.step_with_gradients(tokens)
    if not harness.is_rank0:
        return _SmallGradients()
    head = "model.embed_tokens.weight" if config.model.tie_embeddings else "lm_head.weight"
    large, small = (
        _compute_exact_row(variant, weights, tokens, rows, head)
        for rows in (slice(0, dp), slice(dp, None))
    )
    shares, count = (gradients[head][_LARGE] - large) / small, len(tokens) - dp
    spacing = compute_spacing(large / dp)
    fraction = np.abs(small) / count / spacing
    deviation = spacing * np.sqrt(count * fraction * (1 - fraction)) / np.abs(small)
    return _SmallGradients(float(shares.mean()), float(shares.std() / deviation.mean()))


def _build_weights(config: Config) -> FullTensors:
    """Return weights with opposite rows of two tokens, layers without effect, and RMSNorm.

    The hidden state of a token is the sign vector of its row; its logit of itself is 1 to 2, and
    that of the other token the negative.
    """
    weights = bypass_layers(config, sample_weights(config))
    signs = np.random.default_rng(config.run.seed).choice([-1.0, 1.0], config.model.hidden_size)
    scale = 2.0 ** -math.floor(math.log2(config.model.hidden_size / 2))
    rows = np.zeros((config.model.vocab_size, config.model.hidden_size), np.float32)
    rows[_LARGE], rows[_SMALL] = scale * signs, -scale * signs
    heads = {} if config.model.tie_embeddings else {"lm_head.weight": rows}
    return weights | {"model.embed_tokens.weight": rows, **heads}


def _compute_exact_row(
    config: Config, weights: FullTensors, tokens: NDArray[np.int32], rows: slice, head: str
) -> NDArray[np.float64]:
    """Return the exact gradient of the first token's row of the head from some sequences."""
    masks = build_masks(config, sample_documents(config, tokens))
    num_targets = reference_model.count_targets(tokens, masks)
    selected = masks.select_rows(np.arange(len(tokens))[rows])
    _, gradients = reference_model.compute_gradients(
        config.model, weights, tokens[rows], num_targets, selected
    )
    row: NDArray[np.float64] = gradients[head][_LARGE]
    return row
