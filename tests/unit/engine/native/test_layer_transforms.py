"""Number of graphs of compiled layers."""

import numpy as np
import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine

pytestmark = pytest.mark.slow  # imports the compiler

SMALL = (
    *("model.hidden_size=32", "model.intermediate_size=64", "model.vocab_size=128"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=1", "model.attention.head_dim=8"),
    *("batch=tiny", "batch.sequence_length=72", "batch.global_batch_size=8"),
    *("batch.micro_batch_size=4", "precision=fp32", "hardware=cpu", "parallelism=single"),
    *("compiler=inductor", "engine.device=cpu", "run.steps=2"),
)
WINDOW = (
    "model.attention.sliding_window=7",
    "model.attention.layer_pattern=[full,sliding,sliding]",
)
MODELS = {
    "gemma 3": (("model=gemma3_1b",), 2),
    "smollm3": (("model=smollm3_3b",), 2),
    "windows and rope": (
        (
            *("model=tiny", "model.num_layers=12", *WINDOW),
            "model.rope.layer_pattern=[true,true,true,false]",
        ),
        4,
    ),
    "selective checkpointing": (
        ("model=tiny", "model.num_layers=12", "parallelism.activation_checkpointing=selective"),
        1,
    ),
    "full checkpointing": (
        ("model=tiny", "model.num_layers=12", "parallelism.activation_checkpointing=full"),
        1,
    ),
}
"""Overrides and number of kinds of layers."""


@pytest.mark.filterwarnings("ignore")  # of torch
@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_layers_has_one_graph_for_training_and_one_for_evaluation(
    compose, monkeypatch, name: str
) -> None:
    overrides, num_kinds = MODELS[name]
    graphs = _record_graphs(monkeypatch)
    engine = NativeEngine()
    engine.build(resolve_config(compose(*overrides, *SMALL)))
    for _ in range(2):
        engine.train_step(_sample(8), 1e-3)
    assert len(graphs) == num_kinds
    for num_sequences in (8, 5, 1, 3):
        engine.eval_step(_sample(num_sequences))
    assert len(graphs) == 2 * num_kinds
    state = engine.create_decode_state().select(np.zeros(2, np.int64), 16)
    for length in (5, 1):
        state.append(np.ones((2, length), np.int32), np.array([length, 1]))
    engine.train_step(_sample(8), 1e-3)
    assert len(graphs) == 2 * num_kinds


@pytest.mark.filterwarnings("ignore")  # of torch
def test_padding_of_evaluation_batches_changes_no_loss(compose, monkeypatch) -> None:
    _record_graphs(monkeypatch)
    losses = []
    for compiler in ("compiler=inductor", "compiler=none"):
        engine = NativeEngine()
        engine.build(resolve_config(compose("model=tiny", *SMALL, compiler)))
        losses.append([engine.read_metrics(engine.eval_step(_sample(n))).loss for n in (5, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def _record_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Replace the backend by one that runs and records the graphs, which generates no code."""
    torch.compiler.reset()  # numbers of models that were compiled before
    graphs, compile_ = [], torch.compile

    def record(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def compile_with_record(function, **options):
        return compile_(function, **options | {"backend": record})

    monkeypatch.setattr(torch, "compile", compile_with_record)
    return graphs


def _sample(num_sequences: int) -> PackedSequences:
    tokens = np.random.default_rng(num_sequences).integers(1, 128, (num_sequences, 72), np.int32)
    return PackedSequences(tokens, np.zeros_like(tokens))
