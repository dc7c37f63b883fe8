"""Every family equals transformers: logits, loss, gradients, an update, and generation.

docs/generate_family_table.py writes the results to docs/models.md.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.model.computation_settings import replace_settings
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import count_parameters, list_parameter_specs
from hlat.model.families import FAMILY_NAMES
from hlat.model.kv_cache import KVCache, LayerKVCache
from hlat.model.loss import IGNORE_INDEX, build_next_token_targets, linear_cross_entropy
from hlat.model.mlp_spec import get_mlp_spec
from hlat.model.parameter_spec import ParameterRole
from hlat.model.step_statistics import StepStatistics
from hlat.model.token_sampling import select_argmax_tokens
from hlat.optim.adamw import ADAMW
from hlat.optim.optimizer_factory import build_optimizer, build_param_groups
from tests.support.model_families import (
    MAX_LENGTH,
    TINY_MODELS,
    build_decoder,
    build_transformers_model,
    get_canonical_tensors,
    get_peer_tensors,
    small_models,
)

TOLERANCE = 1e-5
"""Maximum relative error in the 2-norm of a tensor."""
SMALL_GRADIENT = 3e-2
"""Norm of a gradient relative to the largest one, below which rounding errors of others count."""
EXAMPLES = settings(
    max_examples=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

FIXED_SEED = seed(0)
"""Examples that do not depend on the source of a test, with known rounding errors."""

DEFAULT = {"llama", "qwen3", "olmo2", "gemma3", "smollm3"}
"""Families of the default suite; the others are slow."""
each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in DEFAULT else [pytest.mark.slow])
        for family in FAMILY_NAMES
    ],
)

COLUMNS = {
    "test_logits_loss_gradients_and_update": ("logits", "loss", "gradients"),
    "test_greedy_generation": ("generation",),
    "test_generation_beyond_the_window_of_a_preset": ("generation",),
}
"""Columns of the table that a test belongs to."""


@pytest.fixture(autouse=True)
def record_columns(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Record family and columns of a test."""
    for column in COLUMNS.get(request.node.originalname, ()):
        record_property("column", column)
        record_property("family", request.node.callspec.params["family"])


def compute_error(result: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the error relative to the norm of the expected tensor, or to `floor` if larger."""
    with torch.no_grad():
        difference = (result.reshape(expected.shape) - expected).norm()
        return float(difference / max(float(expected.norm()), floor, 1e-30))


def sample_tokens(model: ModelConfig, num_sequences: int, length: int) -> Tensor:
    """Return random token ids, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab_size, (num_sequences, length), generator=generator)


def sample_documents(data: st.DataObject, tokens: Tensor) -> Tensor:
    """Return the document of each token, with documents of random lengths."""
    starts = data.draw(
        st.lists(st.booleans(), min_size=tokens.numel(), max_size=tokens.numel()), "starts"
    )
    return torch.tensor(starts).reshape(tokens.shape).cumsum(1)


def compute_positions(documents: Tensor) -> Tensor:
    """Return positions that restart at 0 in each document."""
    positions = torch.zeros_like(documents)
    for row, ids in enumerate(documents.tolist()):
        for column in range(1, len(ids)):
            same = ids[column] == ids[column - 1]
            positions[row, column] = positions[row, column - 1] + 1 if same else 0
    return positions


def compute_losses(
    decoder: Decoder, peer: torch.nn.Module, tokens: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return our loss, that of transformers, and the logits of transformers.

    transformers derives the document mask from positions that restart.
    """
    targets = build_next_token_targets(tokens, documents)
    scale = 1 / max(1, int((targets != IGNORE_INDEX).sum()))
    head = decoder.config.head
    loss = linear_cross_entropy(
        decoder(tokens, documents),
        decoder.lm_head_weight,
        targets,
        scale,
        softcap=head.logit_softcap,
        z_loss=head.z_loss,
    )
    positions = None if documents is None else compute_positions(documents)
    logits = peer(tokens, position_ids=positions, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return loss, expected * scale, logits


@each_family
@FIXED_SEED
@EXAMPLES
@given(data=st.data())
@pytest.mark.slow_after(2)
def test_logits_loss_gradients_and_update(family: str, data: st.DataObject) -> None:
    model = data.draw(small_models(family), "model")
    peer = build_transformers_model(model, seed=data.draw(st.integers(0, 99), "seed")).train()
    decoder = build_decoder(model, peer)
    length = data.draw(st.integers(8, MAX_LENGTH), "length")
    tokens = sample_tokens(model, 2, length)
    documents = sample_documents(data, tokens) if data.draw(st.booleans(), "packed") else None
    assert_equal_training(decoder, peer, tokens, documents)


@pytest.mark.parametrize(
    "family", [name for name, model in TINY_MODELS.items() if model.mlp.kind == "moe"]
)
@FIXED_SEED
@settings(parent=EXAMPLES, max_examples=8)
@given(data=st.data())
def test_router_statistics(family: str, data: st.DataObject) -> None:
    """Loads, entropies and the maximum violation are those of the scores of transformers."""
    model = data.draw(small_models(family), "model")
    peer = build_transformers_model(model).train()
    decoder = build_decoder(model, peer)
    modules = [one for one in decoder.modules() if isinstance(one, StepStatistics)]
    for module in modules:
        module.start_step(torch.device("cpu"))
    tokens = sample_tokens(model, 2, 16)
    decoder(tokens).sum().backward()
    output = peer(tokens, output_router_logits=True)
    scores = [logits.detach().softmax(-1) for logits in output.router_logits]
    num_experts, num_selected = model.mlp.moe.num_experts, model.mlp.moe.experts_per_token
    loads = [
        torch.bincount(of_layer.topk(num_selected).indices.flatten(), minlength=num_experts)
        for of_layer in scores
    ]
    assert [module.counts[:-1].tolist() for module in modules] == [one.tolist() for one in loads]
    entropies = [-of_layer.xlogy(of_layer).sum() for of_layer in scores]
    for module, entropy in zip(modules, entropies, strict=True):
        assert float(module.sums) == pytest.approx(float(entropy), rel=TOLERANCE)
    metrics = get_mlp_spec(model).compute_step_metrics(
        model, [one.counts.tolist() for one in modules], [one.sums.tolist() for one in modules]
    )
    mean = tokens.numel() * num_selected / num_experts
    largest = max(float(one.max()) for one in loads)
    assert metrics["router_max_violation"] == pytest.approx(largest / mean - 1, rel=TOLERANCE)


@pytest.mark.parametrize("num_dense_layers", [0, 3])
def test_dense_and_sparse_layers_of_qwen3_moe(num_dense_layers: int) -> None:
    """Layers 1 and 3, or 3 only, have experts; decoder_sparse_step is 2."""
    settings = {
        "num_layers": 4,
        "hidden_size": 24,
        "intermediate_size": 40,
        "vocab_size": 50,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention.head_dim": 12,
        "mlp.moe.num_experts": 5,
        "mlp.moe.intermediate_size": 16,
        "mlp.moe.every": 2,
        "mlp.moe.num_dense_layers": num_dense_layers,
    }
    model = replace_settings(TINY_MODELS["qwen3_moe"], settings)
    peer = build_transformers_model(model).train()
    assert peer.config.decoder_sparse_step == 2
    is_sparse = [hasattr(layer.mlp, "experts") for layer in peer.model.layers]
    assert is_sparse == [False, num_dense_layers == 0, False, True]
    assert count_parameters(model) == sum(one.numel() for one in peer.parameters())
    assert_equal_training(build_decoder(model, peer), peer, sample_tokens(model, 2, 16), None)


def assert_equal_training(
    decoder: Decoder, peer: torch.nn.Module, tokens: Tensor, documents: Tensor | None
) -> None:
    """Compare logits, loss, gradients and the weights after an update with transformers."""
    loss, expected_loss, expected_logits = compute_losses(decoder, peer, tokens, documents)
    assert compute_error(decoder.compute_logits(tokens, documents), expected_logits) < TOLERANCE
    assert compute_error(loss, expected_loss) < TOLERANCE
    loss.backward()
    expected_loss.backward()  # type: ignore[no-untyped-call]
    gradients = get_canonical_tensors(decoder, gradients=True)
    expected_gradients = get_peer_tensors(peer, gradients=True)
    assert gradients.keys() == expected_gradients.keys()
    floor = SMALL_GRADIENT * max(float(g.norm()) for g in expected_gradients.values())
    errors = {
        name: compute_error(gradients[name], gradient, floor)
        for name, gradient in expected_gradients.items()
    }
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    step_optimizers(decoder, peer)
    weights = get_canonical_tensors(decoder)
    for name, expected in get_peer_tensors(peer).items():
        assert compute_error(weights[name], expected) < TOLERANCE, name


def step_optimizers(decoder: Decoder, peer: torch.nn.Module) -> None:
    """Take one step of AdamW with an epsilon that limits the effect of tiny gradients."""
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, decay_norms=True, eps=1e-2)
    params = ((param, ParameterRole.matrix) for param in decoder.parameters())
    build_optimizer(ADAMW, build_param_groups(config, params), config.lr).step()
    betas = (config.beta1, config.beta2)
    torch.optim.AdamW(peer.parameters(), lr=1e-2, betas=betas, eps=1e-2, weight_decay=0.1).step()


@each_family
@FIXED_SEED
@settings(parent=EXAMPLES, max_examples=10)
@given(data=st.data())
def test_names_and_shapes(family: str, data: st.DataObject) -> None:
    model = data.draw(small_models(family), "model")
    peer = build_transformers_model(model)
    expected = {name: tuple(tensor.shape) for name, tensor in get_peer_tensors(peer).items()}
    assert {spec.name: spec.shape for spec in list_parameter_specs(model)} == expected


@each_family
@FIXED_SEED
@settings(parent=EXAMPLES, max_examples=8)
@given(data=st.data())
@pytest.mark.slow_after(2)
def test_greedy_generation(family: str, data: st.DataObject) -> None:
    model = data.draw(small_models(family), "model")
    peer = build_transformers_model(model, seed=data.draw(st.integers(0, 99), "seed")).eval()
    length = data.draw(st.integers(1, MAX_LENGTH // 2), "length")
    prompt = sample_tokens(model, 2, length)
    expected = generate(peer, prompt)
    decoder = build_decoder(model, peer)
    assert generate_greedily(decoder, prompt, MAX_LENGTH).tolist() == expected.tolist()


@each_family
def test_generation_beyond_the_window_of_a_preset(family: str) -> None:
    model = TINY_MODELS[family]
    peer = build_transformers_model(model).eval()
    prompt = sample_tokens(model, 1, 60)
    expected = generate(peer, prompt)
    decoder = build_decoder(model, peer)
    assert generate_greedily(decoder, prompt, MAX_LENGTH).tolist() == expected.tolist()


def generate(peer: Any, prompt: Tensor) -> Tensor:
    """Return the greedy continuation by transformers."""
    found: Tensor = peer.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_LENGTH,
        min_new_tokens=MAX_LENGTH,
        do_sample=False,
        pad_token_id=0,
    )
    return found[:, prompt.shape[1] :]


@torch.inference_mode()
def generate_greedily(decoder: Decoder, prompt: Tensor, num_tokens: int) -> Tensor:
    """Return the greedy continuation by the decoder with a KV cache."""
    model = decoder.config
    capacity = prompt.shape[1] + num_tokens
    shape = (len(prompt), capacity, model.num_key_value_heads, model.head_dim)
    layers = {name: LayerKVCache(torch.zeros(shape), torch.zeros(shape)) for name in decoder.layers}
    tokens, generated, num_cached = prompt, [], 0
    for _ in range(num_tokens):
        positions = torch.arange(num_cached, num_cached + tokens.shape[1])
        num_cached += tokens.shape[1]
        cache = KVCache(layers, positions.expand(len(tokens), -1), num_cached, True)
        last = decoder(tokens, kv_cache=cache)[:, -1]
        softcap = model.head.logit_softcap
        tokens = select_argmax_tokens(last, decoder.lm_head_weight, softcap=softcap).unsqueeze(1)
        generated.append(tokens)
    return torch.cat(generated, dim=1)


def test_a_small_difference_is_found() -> None:
    """Check that the tolerance is below the effect of each component of a model."""
    model: ModelConfig = TINY_MODELS["qwen3"]
    peer = build_transformers_model(model)
    decoder = build_decoder(model, peer)
    tokens = sample_tokens(model, 1, 8)
    with torch.no_grad():
        expected = peer(tokens).logits
        get_canonical_tensors(decoder)["model.layers.0.self_attn.q_norm.weight"][0] += 1e-2
        assert compute_error(decoder.compute_logits(tokens), expected) > TOLERANCE
