"""Diagnostics of a step, compared with their definitions; the step itself does not change."""

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine

SMALL = (
    *("model=tiny", "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64"),
    *("model.vocab_size=128", "model.num_attention_heads=4", "model.num_key_value_heads=2"),
    *("batch.sequence_length=32", "batch.global_batch_size=4", "batch.micro_batch_size=2"),
    *("hardware=cpu", "parallelism=single", "engine.device=cpu"),
)
LR = 1e-2


def build_sequences(step: int) -> PackedSequences:
    return PackedSequences(np.random.default_rng(step).integers(0, 128, (4, 32), np.int32))


def train(
    compose: Callable[..., Any], *overrides: str, diagnosed: tuple[int, ...] = (), steps: int = 3
) -> tuple[list[Any], NativeEngine]:
    """Return the metrics of each step, and the open engine."""
    engine = NativeEngine()
    engine.build(resolve_config(compose(*SMALL, *overrides)))
    rows = [
        engine.read_metrics(engine.train_step(build_sequences(step), LR, step in diagnosed))
        for step in range(steps)
    ]
    return rows, engine


def copy_state(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in engine.state_shards()}


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=fp32",),
        ("precision=bf16_sr",),
        ("precision=mixed", "model.mlp.kind=moe", "model.mlp.moe.num_experts=4"),
        pytest.param(("compiler=inductor",), marks=pytest.mark.filterwarnings("ignore")),
        ("optimizer=muon_tiny",),
    ],
    ids=" ".join,
)
def test_losses_and_state_are_bit_identical(
    compose: Callable[..., Any], overrides: tuple[str, ...]
) -> None:
    plain, engine = train(compose, *overrides)
    with closing(engine):
        expected = copy_state(engine)
    diagnosed, engine = train(compose, *overrides, diagnosed=(0, 2))
    with closing(engine):
        assert [one.scalars for one in diagnosed] == [one.scalars for one in plain]
        found = copy_state(engine)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "update_rms" in diagnosed[2].model_metrics
    assert "update_rms" not in diagnosed[1].model_metrics
    json.dumps(diagnosed[2].model_metrics, allow_nan=False)


def test_values_are_those_of_their_definitions(compose: Callable[..., Any]) -> None:
    """Repeat the last step in fp32 with autograd and AdamW's equations."""
    _, engine = train(compose, "precision=fp32", "optimizer.grad_clip=0", "optimizer.eps=1e-4")
    with closing(engine):
        before = copy_state(engine)
        part, sequences = engine.model_parts[0], build_sequences(3)
        tokens = torch.from_numpy(sequences.tokens).long()
        logits = part.compute_logits(tokens)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        gradients = dict(
            zip(
                [name for name, _ in part.named_parameters()],
                torch.autograd.grad(loss, [*part.parameters()]),
                strict=True,
            )
        )
        found = engine.read_metrics(engine.train_step(sequences, LR, True)).model_metrics
        after = copy_state(engine)
        squares = [
            float((after[name] - before[name]).square().sum())
            for name in before
            if name.startswith("weights/")
        ]
        num_weights = sum(before[name].numel() for name in before if name.startswith("weights/"))
        ratios, underflow, compared = [], 0, 0
        beta2 = engine.config.optimizer.beta2
        for name, gradient in gradients.items():
            moment = engine.params.get_state(name)["exp_avg_sq"] / (1 - beta2**4)
            ratios.append(float((gradient**2 / moment.clamp(min=1e-8)).mean()))
            underflow += int(((gradient != 0) & (moment < 1e-8)).sum())
            compared += int((gradient != 0).sum())
    assert found["update_rms"] == pytest.approx((sum(squares) / num_weights) ** 0.5 / LR, rel=1e-5)
    assert found["moment_ratio_rms"] == pytest.approx(max(ratios) ** 0.5, rel=1e-3)
    assert 0 < underflow < compared
    assert found["moment_underflow"] == pytest.approx(underflow / compared, rel=1e-3)
    assert found["unchanged_weights"] == 0
    first = logits[:1].detach()
    assert found["output_logit_max"] == pytest.approx(float(first.amax()), rel=1e-5)
    log_z = torch.logsumexp(first, -1).mean()
    assert found["output_log_z"] == pytest.approx(float(log_z), rel=1e-5)
    assert len(found["attention_logits"]) == 2
    assert max(found["attention_logits"]) == found["attention_logit_max"]


def test_attention_logits_are_those_of_queries_and_keys(compose: Callable[..., Any]) -> None:
    """Observe queries and keys by a hook, with QK-norm, a window, documents and a softcap."""
    overrides = (
        *("model.attention.qk_norm=true", "model.attention.sliding_window=8"),
        *("data.document_mask=true", "model.attention.logit_softcap=1.0"),
    )
    engine = NativeEngine()
    engine.build(resolve_config(compose(*SMALL, *overrides)))
    with closing(engine):
        tokens = build_sequences(0).tokens
        documents = np.cumsum(np.random.default_rng(1).random(tokens.shape) < 0.1, axis=1)
        sequences = PackedSequences(tokens, documents.astype(np.int32))
        seen: list[float] = []

        def record(module: Any, inputs: tuple[Any, ...]) -> None:
            q, k = inputs[0][:1].float(), inputs[1][:1].float().repeat_interleave(2, 1)
            scores = q @ k.transpose(-1, -2) * module.scale
            distance = torch.arange(32)[:, None] - torch.arange(32)
            same = torch.from_numpy(documents[0][:, None] == documents[0])
            mask = (distance >= 0) & (distance < 8) & same
            seen.append(float(scores.masked_fill(~mask, -torch.inf).amax()))

        cores = [layer.self_attn.core for layer in engine.model_parts[0].layers.values()]
        handles = [core.register_forward_pre_hook(record) for core in cores]
        engine.eval_step(PackedSequences(tokens[:1], sequences.document_ids[:1]))
        for handle in handles:
            handle.remove()
        found = engine.read_metrics(engine.train_step(sequences, LR, True)).model_metrics
    assert found["attention_logits"] == pytest.approx(seen, rel=1e-5)


def test_pure_bf16_leaves_weights_unchanged(compose: Callable[..., Any]) -> None:
    """A rate far below the distance of two bf16 numbers changes few weights, unless it is rounded
    stochastically or the weights are fp32."""
    shares = {}
    for precision in ("bf16", "bf16_sr", "mixed"):
        engine = NativeEngine()
        engine.build(resolve_config(compose(*SMALL, f"precision={precision}")))
        with closing(engine):
            metrics = engine.read_metrics(engine.train_step(build_sequences(0), 1e-6, True))
        shares[precision] = metrics.model_metrics["unchanged_weights"]
    assert shares["bf16"] > 0.9
    assert shares["mixed"] < 0.01
    assert shares["bf16_sr"] < shares["bf16"]


def test_a_skipped_step_changes_nothing(compose: Callable[..., Any]) -> None:
    _, engine = train(compose, steps=1)
    with closing(engine):
        weight = engine.model_parts[0].lm_head_weight
        with torch.no_grad():
            weight[5] = torch.inf
        found = engine.read_metrics(engine.train_step(build_sequences(1), LR, True)).model_metrics
    assert found["unchanged_weights"] == 1.0
