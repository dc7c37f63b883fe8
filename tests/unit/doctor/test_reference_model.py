"""The reference decoder equals transformers in logits, loss and gradients of every component."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from hlat.config.model import ModelConfig
from hlat.doctor import reference_model
from hlat.doctor.reference_model import DocumentMasks
from hlat.model.attention_spec import AttentionConfig, LayerType, QKNormScope
from hlat.model.embedding_spec import EmbeddingConfig, HeadConfig
from hlat.model.mlp_spec import Activation, MLPConfig
from hlat.model.norm_spec import NormConfig, NormPlacement
from hlat.model.rope_spec import RopeConfig, RopeScaling

transformers = pytest.importorskip("transformers")

SLIDING, FULL = LayerType.sliding, LayerType.full
LENGTH = 23


def build_model(num_layers: int = 2, **settings: Any) -> ModelConfig:
    """Return a small model in which query heads share key/value heads."""
    shape = {"num_layers": num_layers, "hidden_size": 32, "intermediate_size": 44}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 37}
    return ModelConfig(name="small", rms_norm_eps=1e-5, **shape | heads | settings)


LLAMA3 = RopeConfig(RopeScaling.llama3, 8.0, 64)
YARN = RopeConfig(RopeScaling.yarn, 4.0, 64, beta_fast=4.0)
GEMMA = {
    "norm": NormConfig(NormPlacement.sandwich, zero_centered=True),
    "mlp": MLPConfig(Activation.geglu),
    "embedding": EmbeddingConfig(scale_by_sqrt_hidden=True),
    "tie_embeddings": True,
}
HEAD_DIM = {"head_dim": 12, "scale": 20**-0.5}
HF_GEMMA = {"query_pre_attn_scalar": 20, "head_dim": 12}


def hf_rope(scaling: str = "default", **settings: Any) -> dict[str, Any]:
    """Return rope_parameters of transformers."""
    return {"rope_type": scaling, "rope_theta": 1000.0, **settings}


HF_LLAMA3 = hf_rope(
    "llama3",
    factor=8.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
HF_YARN = hf_rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0)

CASES: dict[str, tuple[str, ModelConfig, dict[str, Any]]] = {
    "llama": ("Llama", build_model(), {}),
    "llama, tied": ("Llama", build_model(tie_embeddings=True), {}),
    "llama, head size and biases": (
        "Llama",
        build_model(attention=AttentionConfig(head_dim=6, qkv_bias=True, output_bias=True)),
        {"head_dim": 6, "attention_bias": True},
    ),
    "llama3 scaling": ("Llama", build_model(rope=LLAMA3), {"rope_parameters": HF_LLAMA3}),
    "linear scaling": (
        "Llama",
        build_model(rope=RopeConfig(RopeScaling.linear, 3.0)),
        {"rope_parameters": hf_rope("linear", factor=3.0)},
    ),
    "dynamic scaling": (
        "Llama",
        build_model(rope=RopeConfig(RopeScaling.dynamic, 3.0, 11)),
        {"rope_parameters": hf_rope("dynamic", factor=3.0), "max_position_embeddings": 11},
    ),
    "dynamic scaling of short sequences": (
        "Llama",
        build_model(rope=RopeConfig(RopeScaling.dynamic, 3.0, 64)),
        {"rope_parameters": hf_rope("dynamic", factor=3.0), "max_position_embeddings": 64},
    ),
    "yarn scaling": ("Llama", build_model(rope=YARN), {"rope_parameters": HF_YARN}),
    "yarn scaling, exact limits": (
        "Llama",
        build_model(rope=replace(YARN, truncate=False, attention_factor=1.5)),
        {"rope_parameters": HF_YARN | {"truncate": False, "attention_factor": 1.5}},
    ),
    "qwen2": ("Qwen2", build_model(attention=AttentionConfig(qkv_bias=True)), {}),
    "qwen3": (
        "Qwen3",
        build_model(attention=AttentionConfig(head_dim=12, qk_norm=True)),
        {"head_dim": 12},
    ),
    "mistral": (
        "Mistral",
        build_model(attention=AttentionConfig(sliding_window=5)),
        {"sliding_window": 5},
    ),
    "olmo2": (
        "Olmo2",
        build_model(
            attention=AttentionConfig(qk_norm=True, qk_norm_scope=QKNormScope.projection),
            norm=NormConfig(NormPlacement.post),
        ),
        {},
    ),
    "olmo3": (
        "Olmo3",
        build_model(
            4,
            attention=AttentionConfig(
                qk_norm=True,
                qk_norm_scope=QKNormScope.projection,
                sliding_window=5,
                layer_pattern=[SLIDING] * 3 + [FULL],
            ),
            norm=NormConfig(NormPlacement.post),
            rope=replace(YARN, sliding_theta=1000.0),
        ),
        {
            "sliding_window": 5,
            "rope_parameters": {"sliding_attention": hf_rope(), "full_attention": HF_YARN},
        },
    ),
    "gemma2": (
        "Gemma2",
        build_model(
            attention=AttentionConfig(
                **HEAD_DIM, sliding_window=4, layer_pattern=[SLIDING, FULL], logit_softcap=2.0
            ),
            head=HeadConfig(logit_softcap=3.0),
            **GEMMA,
        ),
        HF_GEMMA
        | {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        build_model(
            3,
            attention=AttentionConfig(
                **HEAD_DIM,
                qk_norm=True,
                sliding_window=4,
                layer_pattern=[SLIDING, SLIDING, FULL],
            ),
            rope=RopeConfig(RopeScaling.linear, 8.0, sliding_theta=50.0),
            **GEMMA,
        ),
        HF_GEMMA
        | {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": hf_rope() | {"rope_theta": 50.0},
                "full_attention": hf_rope("linear", factor=8.0),
            },
        },
    ),
    "smollm3": (
        "SmolLM3",
        build_model(3, rope=RopeConfig(layer_pattern=[True, True, False]), tie_embeddings=True),
        {"no_rope_layer_interval": 3},
    ),
    "smollm3, windows": (
        "SmolLM3",
        build_model(
            4,
            attention=AttentionConfig(sliding_window=6, layer_pattern=[FULL, SLIDING]),
            rope=RopeConfig(layer_pattern=[True, False]),
        ),
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6},
    ),
    "gpt-oss attention": (
        "GptOss",
        build_model(
            attention=AttentionConfig(
                head_dim=12,
                qkv_bias=True,
                output_bias=True,
                sinks=True,
                sliding_window=6,
                layer_pattern=[SLIDING, FULL],
            )
        ),
        {"head_dim": 12, "sliding_window": 6, "num_local_experts": 2},
    ),
    "granite": (
        "Granite",
        build_model(
            attention=AttentionConfig(scale=0.5),
            embedding=EmbeddingConfig(multiplier=3.0),
            residual_multiplier=0.3,
        ),
        {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.3},
    ),
    "arcee": ("Arcee", build_model(mlp=MLPConfig(Activation.relu2)), {}),
    "gelu": (
        "Arcee",
        build_model(mlp=MLPConfig(Activation.gelu)),
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "phi3": (
        "Phi3",
        build_model(rope=RopeConfig(partial_rotary_factor=0.5)),
        {"rope_parameters": hf_rope(partial_rotary_factor=0.5)},
    ),
}
"""Class in transformers, model, and settings of the class that differ from its defaults."""


class Float64(TorchFunctionMode):
    """Replace fp32, which transformers uses for norms, softmax and rotary angles, by fp64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if func is torch.Tensor.float:
            return args[0].double()

        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        settings = {key: widen(value) for key, value in (kwargs or {}).items()}
        return func(*map(widen, args), **settings)


class FeedForward(torch.nn.Module):
    """MLP in place of the experts of gpt-oss."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the output without router scores."""
        return self.mlp(x), None


@pytest.fixture(autouse=True)
def fp64():
    """Compute in fp64, in transformers too."""
    torch.set_default_dtype(torch.float64)
    with Float64():
        yield
    torch.set_default_dtype(torch.float32)


def _build_peer(name: str, model: ModelConfig, settings: dict[str, Any]) -> torch.nn.Module:
    shape = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": hf_rope(),
        "attn_implementation": "eager",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**shape | settings)
    peer = getattr(transformers, f"{name}ForCausalLM")(config)
    if name == "GptOss":
        for layer in peer.model.layers:
            layer.mlp = FeedForward(transformers.models.mistral.modeling_mistral.MistralMLP(config))
    return peer.double()


def _sample_weights(peer: torch.nn.Module) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        name: generator.normal(float("norm" in name), 0.3, tuple(tensor.shape))
        for name, tensor in peer.named_parameters()
    }


def _to_canonical(model: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split the fused weights of phi3."""
    kv_size = model.num_key_value_heads * model.head_dim
    sections = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), [-2 * kv_size, -kv_size]),
        "gate_up_proj": (("gate_proj", "up_proj"), [model.intermediate_size]),
    }
    canonical = {}
    for full_name, tensor in tensors.items():
        *prefix, name, leaf = full_name.replace("mlp.mlp", "mlp").split(".")
        names, rows = sections.get(name, ((name,), []))
        for part, values in zip(names, np.split(tensor, rows), strict=True):
            canonical[".".join((*prefix, part, leaf))] = values
    return canonical


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_transformers(case: str) -> None:
    name, model, settings = CASES[case]
    model = replace(model, rope_theta=1000.0)
    peer = _build_peer(name, model, settings)
    tensors = _sample_weights(peer)
    peer.load_state_dict({k: torch.from_numpy(v) for k, v in tensors.items()}, strict=False)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (3, LENGTH), np.int32)
    labels = torch.from_numpy(tokens).long()
    expected_logits = peer(input_ids=labels).logits
    expected = cross_entropy(expected_logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()

    weights = _to_canonical(model, tensors)
    leaves = {key: torch.from_numpy(value) for key, value in weights.items()}
    logits = reference_model.compute_logits(model, leaves, labels)
    assert torch.allclose(logits, expected_logits, rtol=1e-10, atol=1e-10)
    num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
    loss, gradients = reference_model.compute_gradients(model, weights, tokens, num_targets)
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    assert reference_model.compute_mean_loss(model, weights, tokens) == pytest.approx(loss, 1e-12)
    expected_gradients = _to_canonical(
        model, {key: value.grad.numpy() for key, value in peer.named_parameters()}
    )
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        gap = np.linalg.norm(gradient - expected_gradients[key])
        assert gap <= 1e-10 * np.linalg.norm(gradient), key
        assert np.linalg.norm(gradient) > 1e-8, key


def test_z_loss_changes_only_the_gradients() -> None:
    model = replace(build_model(), head=HeadConfig(z_loss=0.01))
    peer = _build_peer("Llama", model, {})
    weights = _sample_weights(peer)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, LENGTH), np.int32)
    num_targets = 2 * (LENGTH - 1)
    loss, gradients = reference_model.compute_gradients(model, weights, tokens, num_targets)
    plain = replace(model, head=HeadConfig())
    plain_loss, plain_gradients = reference_model.compute_gradients(
        plain, weights, tokens, num_targets
    )
    assert loss == plain_loss
    leaves = {key: torch.from_numpy(value).requires_grad_() for key, value in weights.items()}
    logits = reference_model.compute_logits(plain, leaves, torch.from_numpy(tokens).long())
    logits[:, :-1].exp().sum(-1).log().pow(2).mean().backward()
    for name, gradient in gradients.items():
        change = gradient - plain_gradients[name]
        assert np.allclose(change, 0.01 * leaves[name].grad.numpy(), rtol=1e-8, atol=1e-14), name


@pytest.mark.parametrize("window", [None, 5])
def test_documents_are_computed_as_if_alone(window) -> None:
    settings = AttentionConfig(sliding_window=window)
    model = replace(build_model(), attention=settings)
    generator = np.random.default_rng(1)
    weights = _sample_weights(_build_peer("Llama", build_model(), {}))
    tokens = generator.integers(0, model.vocab_size, (1, LENGTH), np.int32)
    documents = np.repeat([0, 1, 2], [9, 1, LENGTH - 10]).astype(np.int32)[None]
    masks = DocumentMasks(documents, documents)
    parts = [tokens[documents == n][None] for n in (0, 2)]  # the other has no target
    alone = [reference_model.compute_gradients(model, weights, part, LENGTH - 3) for part in parts]
    assert reference_model.count_targets(tokens, masks) == LENGTH - 3
    loss, gradients = reference_model.compute_gradients(model, weights, tokens, LENGTH - 3, masks)
    assert loss == pytest.approx(sum(loss for loss, _ in alone), rel=1e-12)
    for name, gradient in gradients.items():
        expected = sum(part[name] for _, part in alone)
        assert np.allclose(gradient, expected, rtol=1e-9, atol=1e-14), name
    nats = reference_model.compute_nats(model, weights, tokens, masks)
    assert np.isnan(nats[0, [8, 9]]).all()
    assert np.isnan(nats).sum() == 2


def test_loss_mask_leaves_attention_across_documents() -> None:
    model, generator = build_model(), np.random.default_rng(1)
    weights = _sample_weights(_build_peer("Llama", model, {}))
    tokens = generator.integers(0, model.vocab_size, (2, LENGTH), np.int32)
    documents = np.repeat([[0, 1], [0, 0]], [9, LENGTH - 9], axis=1).astype(np.int32)
    nats = reference_model.compute_nats(model, weights, tokens)
    masked = reference_model.compute_nats(model, weights, tokens, DocumentMasks(loss=documents))
    assert np.isnan(masked).sum() == 1
    assert np.isnan(masked[0, 8])
    assert np.array_equal(masked[~np.isnan(masked)], nats[~np.isnan(masked)])
