"""Checks of evaluation: labels, the targets in the mean, and decoding with a KV cache."""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.doctor import reference_model, tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.sampled_inputs import (
    FullTensors,
    build_masks,
    sample_batch,
    sample_documents,
    sample_weights,
)

_SHIFTS = range(4)
_NUM_BATCHES = 4
"""With a single batch, the losses of two shifts may be equal by chance."""
_NUM_TARGETS = (1, 2, 5, None)
"""Number of leading targets of each row in the loss of a batch; None: all."""

_NUM_APPENDED = (5, 3, 1)
"""Tokens of the longer sequence in each call, fewer than the positions of a dynamic scaling."""


def check_labels(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that the losses are those of labels shifted by one, and of the selected targets."""
    config, weights = harness.config, sample_weights(harness.config)
    batches = [sample_batch(config, seed) for seed in range(_NUM_BATCHES)]
    harness.load_weights(weights)
    measured = [harness.evaluate(tokens, np.zeros_like(tokens)) for tokens in batches]
    parts = [
        harness.evaluate(
            tokens, sample_documents(config, tokens), _build_target_mask(tokens, count)
        )
        for tokens, count in zip(batches, _NUM_TARGETS, strict=True)
    ]
    if not harness.is_rank0:
        return
    compute_loss = partial(reference_model.compute_mean_loss, config.model, weights)
    expected = np.array(
        [[compute_loss(tokens, shift=shift) for tokens in batches] for shift in _SHIFTS]
    )
    expected_parts = [
        _compute_part(config, weights, tokens, count)
        for tokens, count in zip(batches, _NUM_TARGETS, strict=True)
    ]
    tolerance = tolerances.compute_loss_tolerance(config)
    if not np.allclose(measured, expected[1], rtol=tolerance, atol=0):
        yield _build_failure(measured, expected)
        return
    pairs = zip(_NUM_TARGETS, parts, expected_parts, strict=True)
    wrong = [pair for pair in pairs if not abs(pair[1] / pair[2] - 1) <= tolerance]
    problems = [
        f"the loss of {'all' if count is None else f'the first {count}'} targets of each row is "
        f"{loss:.5f}, expected {exact:.5f}"
        for count, loss, exact in wrong
    ]
    yield build_result(
        "labels",
        [FaultLocation("targets in the mean", "model")] if wrong else [],
        f"the loss {measured[0]:.5f} is that of the next token ({expected[1][0]:.5f}), and that of "
        "the first targets and of documents is right",
        "; ".join(problems),
        loss=measured[0],
        expected=expected[1][0],
        shift=1,
    )


def _build_target_mask(tokens: NDArray[np.int32], count: int | None) -> NDArray[np.bool_] | None:
    """Return True for the first targets of each row, [n, S]; None for all."""
    if count is None:
        return None
    return np.tile(np.arange(tokens.shape[1]) <= count, (len(tokens), 1))


def _compute_part(
    config: Config, weights: FullTensors, tokens: NDArray[np.int32], count: int | None
) -> float:
    """Return the mean loss of the first targets of each row with documents."""
    masks = build_masks(config, sample_documents(config, tokens))
    nats = reference_model.compute_nats(config.model, weights, tokens, masks)[:, :count]
    return float(np.nanmean(nats))


def _build_failure(measured: list[float], expected: NDArray[np.float64]) -> CheckResult:
    """Return the result of losses that are not those of the next token, with the nearest shift."""
    loss, exact = measured[0], expected[1][0]
    if not np.isfinite(measured).all():
        message = f"the loss {loss:.5f} is not finite; expected {exact:.5f}"
        return build_result("labels", [FaultLocation("loss", "model")], "", message)
    nearest = int(np.argmin(np.linalg.norm(expected - measured, axis=1)))
    if nearest == 1:
        message = f"the loss {loss:.5f} is not that of the next token ({exact:.5f})"
        return build_result("labels", [FaultLocation("loss", "model")], "", message)
    message = (
        f"the loss {loss:.5f} is that of labels shifted by {nearest} "
        f"({expected[nearest][0]:.5f}) instead of one ({exact:.5f})"
    )
    return build_result("labels", [FaultLocation("labels", "model")], "", message, shift=nearest)


def check_decoding(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check the log-probabilities of tokens appended to sequences of different lengths."""
    config, weights = harness.config, sample_weights(harness.config)
    harness.load_weights(weights)
    tokens = np.ascontiguousarray(sample_batch(config)[:1].repeat(2, 0))
    try:
        state = harness.engine.create_decode_state()
    except ConfigError as error:
        yield skip_check("decoding", error.problems[0])
        return
    state = state.select(np.zeros(2, np.int64), sum(_NUM_APPENDED))
    lengths, measured = np.zeros(2, np.int64), list[NDArray[np.float32]]()
    for num_tokens in _NUM_APPENDED:
        # The second sequence has one token less from the first call on
        counts = np.array([num_tokens, num_tokens - (not measured)])
        appended = [row[n : n + num_tokens] for row, n in zip(tokens, lengths, strict=True)]
        state.append(np.stack(appended), counts)
        lengths = lengths + counts
        targets = tokens[np.arange(2), lengths].astype(np.int64)
        measured.append(-state.compute_log_probs(np.arange(2), counts - 1, targets)[0])
    if not harness.is_rank0:
        return
    prefix = tokens[:, : lengths.max() + 1]
    nats = reference_model.compute_nats(config.model, weights, prefix)[0]
    ends = np.cumsum(_NUM_APPENDED)[:, None] - [1, 2]
    gap = float(np.abs(np.array(measured) / nats[ends] - 1).max())
    tolerance = tolerances.compute_gradient_tolerance(config)
    yield build_result(
        "decoding",
        [] if gap <= tolerance else [FaultLocation("KV cache", "model")],
        f"log-probabilities with a KV cache have a relative error of at most {gap:.1e}",
        f"log-probabilities with a KV cache have a relative error of {gap:.1e} (tolerance "
        f"{tolerance:.1e})",
        gap=gap,
        tolerance=tolerance,
    )
