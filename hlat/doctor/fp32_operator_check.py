"""Check of operators that a recipe with bf16 matmuls computes in fp32.

The final norm and the loss are measured with values that are exact in bf16, so that an exact loss
is expected: layers without effect, embeddings that are multiples of one sign vector, which the norm
maps to the sign vector, and logits with few bits. Rotary angles in bf16 are wrong by a radian at
late positions, and are measured by the gradients of longer sequences. A mean of equal values is the
value, unless the probabilities of the softmax are rounded to bf16, in which 1 / n is inexact for
most n.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hlat.config.batch import BatchConfig
from hlat.config.engine import EngineBackend
from hlat.config.precision import Dtype, Fp32Operator
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.doctor import gradient_fault_location, reference_model
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.extension_reference import is_extended
from hlat.doctor.sampled_inputs import FullTensors, bypass_layers, sample_batch, sample_weights
from hlat.model.parameter_spec import ParameterRole

_OPERATORS = (Fp32Operator.norm, Fp32Operator.loss)
"""Operators whose result for exact values is exact; each is needed for an exact loss."""
_TOLERANCE = 1e-5
"""Maximum relative error of the loss; that of one rounding to bf16 is about 1e-4 or more."""
_NUM_TOKENS = 8
"""Tokens of which a batch is repeated, so that its positions have the same error."""
_EMBEDDING_SCALE = 16.0
"""Large, so that the epsilon of the norm has no effect."""
_LOGIT_STEP = 0.125
_LENGTH = 512
"""Sequence length at which angles in bf16 are wrong by up to a radian."""
_ABSENT_SINK = -100.0
"""Logit that adds nothing to the denominator of a softmax."""
_MAX_CHANGED_FRACTION = 0.02
"""Maximum fraction of losses that differ. A matmul may round some rows differently; a softmax in
bf16 changes at least 5%."""


def check_fp32_operators(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that norm, loss, rotary angles and softmax are in fp32 if matmuls are in bf16."""
    config, precision = harness.config, harness.config.precision
    if precision.compute_dtype is not Dtype.bf16:
        yield skip_check("fp32 operators", "all operators are in fp32")
        return
    faults, problems, gap = [], [], 0.0
    operators = {*precision.fp32_operators}
    # The final norm, which is RMSNorm, and the loss are in fp32
    has_exact_loss = {*_OPERATORS} <= operators and not is_extended(config.model, "model.norm")
    if has_exact_loss:
        gap = _measure_loss_error(harness)
    if not gap <= _TOLERANCE:
        faults.append(FaultLocation("norm or loss", "precision"))
        problems.append(
            f"the loss of values that are exact in bf16 has a relative error of {gap:.1e} "
            f"(tolerance {_TOLERANCE:.1e}): the final norm or the loss is not in fp32"
        )
    wrong = _find_wrong_angles(harness) if harness.can_rebuild else set()
    if wrong:
        faults += [FaultLocation(f"rotary angles of {name}", "precision") for name in sorted(wrong)]
        problems.append(
            f"the gradients of {len(wrong)} projections of queries and keys are wrong in sequences "
            f"of {_LENGTH} tokens: rotary angles are not in fp32"
        )
    # Probabilities are not rounded; engine=nxd casts them to bf16 for a matmul
    is_native = config.engine.name is EngineBackend.native
    has_exact_softmax = is_native and Fp32Operator.softmax in operators
    fraction = _measure_changed_fraction(harness) if has_exact_softmax else 0.0
    if not fraction <= _MAX_CHANGED_FRACTION:
        faults.append(FaultLocation("softmax", "precision"))
        problems.append(
            f"{fraction:.0%} of the losses of equal tokens depend on their position (tolerance "
            f"{_MAX_CHANGED_FRACTION:.0%}): the softmax of attention is not in fp32"
        )
    yield build_result(
        "fp32 operators",
        faults,
        (f"norm and loss have a relative error of {gap:.1e}, and " if has_exact_loss else "")
        + f"rotary angles {'and softmax ' if has_exact_softmax else ''}are right",
        "; ".join(problems),
        gap=gap,
        fraction=fraction,
    )


def _measure_loss_error(harness: EngineHarness) -> float:
    """Return the largest relative error of a loss of exact values."""
    config, weights = harness.config, _build_exact_weights(harness.config)
    harness.load_weights(weights)
    errors = []
    for token in sample_batch(config)[0, :_NUM_TOKENS]:
        tokens = np.full_like(sample_batch(config), token)
        loss = harness.evaluate(tokens, np.zeros_like(tokens))
        exact = reference_model.compute_mean_loss(config.model, weights, tokens[:1])
        errors.append(abs(loss - exact) / exact)
    return float(np.max(errors))


def _build_exact_weights(config: Config) -> FullTensors:
    """Return weights with which hidden states and logits are exact in bf16.

    The embedding of a token is one of 128 multiples of a sign vector. Its row in the head has some
    elements of the sign vector times a power of two.
    """
    model, weights = config.model, bypass_layers(config, sample_weights(config))
    generator = np.random.default_rng(config.run.seed)
    signs = generator.choice([-1.0, 1.0], model.hidden_size)
    multiples = 1 + generator.permutation(model.vocab_size) % 128 / 128
    rows = _EMBEDDING_SCALE * np.outer(multiples, signs)
    weights["model.embed_tokens.weight"] = rows.astype(np.float32)
    if model.tie_embeddings:
        return weights
    counts = generator.integers(0, model.hidden_size + 1, (model.vocab_size, 1))
    head = _LOGIT_STEP * signs * (np.arange(model.hidden_size) < counts)
    return weights | {"lm_head.weight": head.astype(np.float32)}


def _find_wrong_angles(harness: EngineHarness) -> set[str]:
    """Return the projections of queries and keys with wrong gradients in a longer sequence."""
    config = harness.config
    num_sequences = config.num_micro_batches * (config.parallelism.dp or 1)
    variant = replace(config, batch=BatchConfig(num_sequences, 1, _LENGTH))
    wrong = gradient_fault_location.find_wrong_names(harness, variant)
    return {name for name in wrong if name.split(".")[-2] in ("q_proj", "k_proj")}


def _measure_changed_fraction(harness: EngineHarness) -> float:
    """Return the fraction of losses of a repeated token that differ from that of its first target.

    Queries of zero weigh all keys equally. Each row of the other projections has one element, so
    that no sum depends on its order.
    """
    config, weights = harness.config, bypass_layers(harness.config, sample_weights(harness.config))
    for name, weight in weights.items():
        projection = name.split(".")[-2]
        if projection == "q_proj":
            weights[name] = np.zeros_like(weight)
        elif projection in ("v_proj", "o_proj") and weight.ndim > 1:
            weights[name] = np.eye(*weight.shape, dtype=np.float32)
        elif harness.parameters[name].role is ParameterRole.sink:
            weights[name] = np.full_like(weight, _ABSENT_SINK)
    harness.load_weights(weights)
    length = config.batch.sequence_length
    tokens = np.repeat(sample_batch(config)[0, :_NUM_TOKENS, None], length, axis=1)
    sequences = PackedSequences(tokens, np.zeros_like(tokens))
    losses = harness.engine.read_metrics(harness.engine.eval_step(sequences)).token_losses
    assert losses is not None
    is_equal = np.isclose(losses, losses[:, :1], rtol=_TOLERANCE, atol=0)
    return float(1 - is_equal.mean())
