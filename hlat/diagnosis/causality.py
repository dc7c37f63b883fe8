"""Whether a token is predicted from what stands before it, and is the one that comes next.

Nothing but losses crosses the seam, so the loss is cut to the targets up to some place (every later
token is a document of its own, whose first token does not count), and what stands behind that place
is changed. The token at the place itself is exchanged for another one with the same row in the
head: it is as probable as before unless the position before it has seen it.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hlat.config.nxd_rules import nxd
from hlat.config.run import Config
from hlat.diagnosis import precise, reference
from hlat.diagnosis.patient import Patient, Whole, batch, lively
from hlat.diagnosis.verdict import Culprit, Outcome, judged

_TWINS = (0, 1)
"""Tokens with the same row in the head."""
_SHIFTS = range(4)
_NUM_BATCHES = 4
"""Losses under two shifts may be alike for one batch by chance, and are not for all."""

Tokens = NDArray[np.int32]


def check_causality(patient: Patient) -> list[Outcome]:
    """No loss changes when what comes later does, nor when another document does."""
    found: list[Culprit] = []
    looked: list[bool] = []
    largest = 0.0
    for config in _paths(patient):
        with patient.other(config) if patient.rebuilds else nullcontext(patient) as one:
            masked = config.data.document_mask
            weights = _twinned(config)
            one.fill(weights)
            leak = _largest(one)
            largest, looked = float(np.max([largest, leak])), [*looked, masked]
            if not leak <= _tolerance(config):
                found += _heads(one, weights, masked)
    tolerance = _tolerance(patient.config)
    paths = " and ".join("inside documents" if masked else "over all tokens" for masked in looked)
    return [
        judged(
            "causality",
            found,
            f"attention {paths}: later tokens move earlier losses by {largest:.1e} at most",
            f"later tokens, or another document's, move a loss by {largest:.1e} "
            f"(at most {tolerance:.1e}): {_named(found)}",
            largest=largest,
            tolerance=tolerance,
        )
    ]


def check_labels(patient: Patient) -> list[Outcome]:
    """Each position predicts the next token: losses are those of labels shifted by one."""
    config, weights = patient.config, lively(patient.config)
    batches = [batch(config, seed) for seed in range(_NUM_BATCHES)]
    patient.fill(weights)
    found = np.array([patient.evaluate(one, np.zeros_like(one)) for one in batches])
    if not patient.leads:
        return []
    losses = np.array(
        [
            [reference.mean_loss(config.model, weights, one, shift) for one in batches]
            for shift in _SHIFTS
        ]
    )
    nearest = int(np.argmin(np.linalg.norm(losses - found, axis=1)))
    told = {shift: f"{losses[shift][0]:.5f}" for shift in _SHIFTS}
    return [
        judged(
            "labels",
            [] if nearest == 1 else [Culprit("labels", "model")],
            f"the loss {found[0]:.5f} is that of the next token ({told[1]})",
            f"the loss {found[0]:.5f} is that of labels shifted by {nearest} ({told[nearest]}), "
            f"and not by one ({told[1]})",
            loss=found[0],
            expected=losses[1][0],
            shift=nearest,
        )
    ]


def _paths(patient: Patient) -> Iterator[Config]:
    """The run with a loss of some targets, and attention over all tokens or inside documents."""
    config = patient.config
    for masked in (False, True):
        data = replace(config.data, loss_mask=True, document_mask=masked)
        variant = replace(config, data=data)
        if not any(nxd(variant)):
            yield variant


def _tolerance(config: Config) -> float:
    """One rounding of each logit, which a row of the head makes at another place."""
    return 4 * precise.unit(config.precision.compute)


def _twinned(config: Config) -> Whole:
    weights = lively(config)
    if "lm_head.weight" in weights:
        one, other = _TWINS
        weights["lm_head.weight"][other] = weights["lm_head.weight"][one]
    return weights


def _largest(patient: Patient) -> float:
    """The largest change of a loss that must not change."""
    pairs = [*_futures(patient.config)]
    if patient.config.data.document_mask:
        pairs += _others(patient.config)
    changes = [
        patient.evaluate(one, documents) - patient.evaluate(other, documents)
        for one, other, documents in pairs
    ]
    return float(np.abs(changes).max())


def _futures(config: Config) -> Iterator[tuple[Tokens, Tokens, Tokens]]:
    """Two batches that differ from a place on, and documents that let all before it count."""
    length, tied = config.batch.sequence_length, config.model.tie_embeddings
    for place in (2, length // 2, length - 2):
        one, other = batch(config, 1), batch(config, 2)
        other[:, :place] = one[:, :place]
        one[:, place], other[:, place] = _TWINS
        last = place - tied
        documents = np.maximum(np.arange(length) - last, 0)
        yield one, other, _rows(documents, one)


def _others(config: Config) -> Iterator[tuple[Tokens, Tokens, Tokens]]:
    """Two batches that differ before the one document that counts."""
    length = config.batch.sequence_length
    for first in (1, length // 2):
        one, other = batch(config, 1), batch(config, 2)
        other[:, first:] = one[:, first:]
        yield one, other, _rows(np.minimum(np.arange(length), first), one)


def _rows(documents: NDArray[np.int64], tokens: Tokens) -> Tokens:
    return np.tile(documents.astype(np.int32), (len(tokens), 1))


def _heads(patient: Patient, weights: Whole, masked: bool) -> list[Culprit]:
    """Which heads leak: each in turn is the only one that anything is heard of."""
    model = patient.config.model
    outputs = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(model.num_layers)]
    silent = weights | {name: np.zeros_like(weights[name]) for name in outputs}
    found = []
    for layer, name in enumerate(outputs):
        for head in range(model.num_attention_heads):
            columns = slice(head * model.head_dim, (head + 1) * model.head_dim)
            heard = np.zeros_like(weights[name])
            heard[:, columns] = weights[name][:, columns]
            patient.fill(silent | {name: heard})
            if not _largest(patient) <= _tolerance(patient.config):
                found.append(Culprit(f"layer {layer} head {head}", "model"))
    path = "attention inside documents" if masked else "attention"
    return found or [Culprit(path, "model")]


def _named(found: list[Culprit]) -> str:
    names = [*dict.fromkeys(culprit.part for culprit in found)]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
