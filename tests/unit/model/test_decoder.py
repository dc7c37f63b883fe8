"""The decoder against transformers' LlamaForCausalLM, through the canonical views."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.data.packed_sequences import compute_document_ids
from hlat.distributed.parameter_shards import slice_row_ranges
from hlat.model import decoder
from hlat.model.canonical_views import iter_row_views as views_of
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import (
    count_parameters,
    list_module_parameters,
    list_parameter_specs,
)
from hlat.model.loss import build_next_token_targets, linear_cross_entropy
from tests.support.canonical_parameters import iter_canonical_views
from tests.support.llama_models import _seed, build_transformers_llama  # noqa: F401

transformers = pytest.importorskip("transformers")

MODELS = {
    "mha": ModelConfig("mha", 2, 64, 96, 4, 4, 131),
    "gqa": ModelConfig("gqa", 2, 96, 104, 6, 2, 131, rope_theta=500000.0),
    "one_kv_head": ModelConfig("one_kv_head", 2, 64, 88, 4, 1, 131, rms_norm_eps=1e-6),
    "head_dim_48": ModelConfig("head_dim_48", 2, 192, 352, 4, 2, 200),
    "tied": ModelConfig("tied", 2, 64, 96, 4, 2, 131, tie_embeddings=True),
}
EOS = 130
PACKED = [[9, 1, 17, 13], [40], [1, 1, 37, 1], [22, 18]]
"""Tokens of the documents of each row, eos included; the last of a row is cut off before its eos."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return MODELS[request.param]


def build_reference(model: ModelConfig) -> torch.nn.Module:
    peer = build_transformers_llama(model, min(0.2, model.hidden_size**-0.5))
    for parameter in peer.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return peer


def views(model: ModelConfig, ours: Decoder, gradients: bool = False) -> dict[str, Tensor]:
    tensors = {n: (p.grad if gradients else p.detach()) for n, p in ours.named_parameters()}
    return dict(iter_canonical_views(model, tensors))


def build_decoder(model: ModelConfig, peer: torch.nn.Module) -> Decoder:
    ours = Decoder(model)
    source = dict(peer.named_parameters())
    for name, view in views(model, ours).items():
        view.copy_(source[name].detach().view(view.shape))
    return ours


def mean_loss(ours: Decoder, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Compute the loss as the engine does, with documents in attention and loss."""
    targets = build_next_token_targets(tokens, documents)
    scale = 1 / max(1, int((targets != -100).sum()))
    return linear_cross_entropy(ours(tokens, documents), ours.lm_head_weight, targets, scale)


def relative_error(result: Tensor, expected: Tensor) -> float:
    with torch.no_grad():
        return float((result - expected).norm() / expected.norm())


def random_model(seed: int) -> ModelConfig:
    """Sample a model with any group size, even head sizes, and arbitrary widths and vocabularies."""
    generator = np.random.default_rng(seed)
    kv_heads, group = generator.integers(1, 5, 2).tolist()
    heads = kv_heads * group
    return ModelConfig(
        f"random{seed}",
        num_layers=int(generator.integers(1, 4)),
        hidden_size=heads * 2 * int(generator.integers(1, 25)),
        intermediate_size=int(generator.integers(1, 200)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=int(generator.integers(2, 400)),
        rope_theta=float(generator.choice([1e4, 5e5, 123.0])),
        rms_norm_eps=float(generator.choice([1e-5, 1e-6])),
        tie_embeddings=bool(generator.random() < 0.3),
    )


@pytest.mark.parametrize(
    "model", [*MODELS.values(), *map(random_model, range(20))], ids=lambda model: model.name
)
def test_logits_loss_and_every_gradient(model: ModelConfig) -> None:
    peer = build_reference(model)
    ours = build_decoder(model, peer)
    tokens = torch.randint(0, model.vocab_size, (3, 17))
    expected = peer(tokens, labels=tokens)
    logits = ours.compute_logits(tokens)
    loss = mean_loss(ours, tokens)
    assert relative_error(logits, expected.logits) < 1e-5
    assert relative_error(loss, expected.loss) < 1e-5
    expected.loss.backward()
    loss.backward()
    gradients = views(model, ours, gradients=True)
    peers = dict(peer.named_parameters())
    assert gradients.keys() == peers.keys()
    for name, gradient in gradients.items():
        expected_gradient = peers[name].grad
        assert (
            relative_error(gradient.reshape(expected_gradient.shape), expected_gradient) < 1e-5
        ), name


def test_round_trip_is_exact(model: ModelConfig) -> None:
    peer = build_reference(model)
    result = views(model, build_decoder(model, peer))
    for name, expected in peer.named_parameters():
        assert torch.equal(result[name].reshape(expected.shape), expected)


def test_names_shapes_and_number_of_parameters_are_canonical(model: ModelConfig) -> None:
    with torch.device("meta"):
        ours = Decoder(model)
    result = views(model, ours)
    assert {p.name: p.numel for p in list_parameter_specs(model)} == {
        n: v.numel() for n, v in result.items()
    }
    assert sum(p.numel() for p in ours.parameters()) == count_parameters(model)
    shapes = {name: tuple(p.shape) for name, p in build_reference(model).named_parameters()}
    assert {p.name: p.shape for p in list_parameter_specs(model)} == shapes


def test_construction_on_meta_allocates_nothing() -> None:
    with torch.device("meta"):
        ours = Decoder(ModelConfig("70b", 8, 8192, 28672, 64, 8, 32000))
        logits = ours.compute_logits(torch.zeros((1, 4096), dtype=torch.int32))
    assert logits.shape == (1, 4096, 32000)
    assert not list(ours.buffers())


def test_rows_between_groups_are_a_tensor_parallel_shard() -> None:
    """Compare the sum of two shards with the full output, as in column then row parallelism."""
    model = MODELS["gqa"]
    ours = build_decoder(model, build_reference(model))
    x = torch.randn(2, 9, model.hidden_size)
    layer = ours.layers["0"]
    cos_sin = torch.randn(2, 9, model.head_dim).unbind()
    entire = (layer.self_attn(x, cos_sin), layer.mlp(x))
    weights = [layer.self_attn.qkv_proj, layer.mlp.gate_up_proj]
    outputs = [layer.self_attn.o_proj, layer.mlp.down_proj]
    columns = [linear.weight.detach().chunk(2, dim=0) for linear in weights]
    rows = [linear.weight.detach().chunk(2, dim=1) for linear in outputs]
    parts = []
    for rank in range(2):
        for linear, shards in zip(weights + outputs, columns + rows, strict=True):
            linear.weight = torch.nn.Parameter(shards[rank])
        parts.append((layer.self_attn(x, cos_sin), layer.mlp(x)))
    for expected, one, other in zip(entire, *parts, strict=True):
        assert relative_error(one + other, expected) < 1e-5


def test_views_of_a_shard_are_shards_of_the_views() -> None:
    model = MODELS["gqa"]
    ours = build_decoder(model, build_reference(model))
    name = "layers.0.mlp.gate_up_proj.weight"
    entire = ours.layers["0"].mlp.gate_up_proj.weight.detach()
    half = len(entire) // 2
    (every,) = (p.rows for p in list_module_parameters(model) if p.name == name)
    parts = [
        slice_row_ranges(every, 0, half),
        slice_row_ranges(every, half, len(entire)),
    ]
    for canonical, view in iter_canonical_views(model, {name: entire}):
        halves = [
            result.reshape(-1, 96)
            for part, tensor in zip(parts, entire.chunk(2), strict=True)
            for rows, result, _ in views_of(part, tensor)
            if rows.name == canonical
        ]
        assert torch.equal(torch.cat(halves), view.reshape(-1, 96))


def test_views_write_through() -> None:
    model = MODELS["mha"]
    ours = Decoder(model)
    for view in views(model, ours).values():
        view.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in ours.parameters())


def test_attention_is_causal() -> None:
    model = MODELS["gqa"]
    ours = build_decoder(model, build_reference(model))
    tokens = torch.randint(0, model.vocab_size, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % model.vocab_size
    before, after = ours.compute_logits(tokens), ours.compute_logits(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_bf16_runs_in_bf16() -> None:
    model = MODELS["gqa"]
    ours = build_decoder(model, build_reference(model))
    tokens = torch.randint(0, model.vocab_size, (2, 12), dtype=torch.int32)
    expected = ours.compute_logits(tokens)
    logits = ours.to(torch.bfloat16).compute_logits(tokens)
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, expected) < 0.05


def pack_documents() -> tuple[Tensor, Tensor]:
    """Return rows of packed documents, and the document id of each token."""
    tokens = torch.randint(0, EOS, (len(PACKED), 40))
    for row, lengths in zip(tokens, PACKED, strict=True):
        row[np.cumsum(lengths[:-1]) - 1] = EOS
    return tokens, torch.from_numpy(compute_document_ids(tokens.numpy(), EOS))


def expected_mask(documents: Tensor) -> Tensor:
    """Build the block-diagonal causal mask [b, 1, s, s] position by position."""
    b, s = documents.shape
    mask = torch.full((b, 1, s, s), float("-inf"))
    for row in range(b):
        for query in range(s):
            for key in range(query + 1):
                if documents[row, query] == documents[row, key]:
                    mask[row, 0, query, key] = 0.0
    return mask


def expected_positions() -> Tensor:
    return torch.tensor([[i for length in row for i in range(length)] for row in PACKED])


def test_masked_logits_of_a_document_equal_those_of_the_document_only(
    model: ModelConfig,
) -> None:
    ours = build_decoder(model, build_reference(model))
    tokens, documents = pack_documents()
    logits = ours.compute_logits(tokens, documents)
    for row, lengths in enumerate(PACKED):
        for part, result in zip(
            tokens[row].split(lengths), logits[row].split(lengths), strict=True
        ):
            torch.testing.assert_close(
                result, ours.compute_logits(part[None])[0], rtol=1e-4, atol=1e-5
            )


def test_masked_logits_loss_and_every_gradient(model: ModelConfig) -> None:
    """Compare with transformers, given mask, positions and labels computed one by one."""
    peer = build_reference(model)
    ours = build_decoder(model, peer)
    tokens, documents = pack_documents()
    labels = tokens.clone()
    for row, lengths in zip(labels, PACKED, strict=True):
        row[np.cumsum(lengths[:-1])] = -100
    expected = peer(
        tokens,
        attention_mask=expected_mask(documents),
        position_ids=expected_positions(),
        labels=labels,
    )
    logits = ours.compute_logits(tokens, documents)
    loss = mean_loss(ours, tokens, documents)
    assert relative_error(logits, expected.logits) < 1e-5
    assert relative_error(loss, expected.loss) < 1e-5
    expected.loss.backward()
    loss.backward()
    peers = dict(peer.named_parameters())
    for name, gradient in views(model, ours, gradients=True).items():
        grad = peers[name].grad
        assert relative_error(gradient.reshape(grad.shape), grad) < 1e-5, name


def test_only_the_mask_separates_documents() -> None:
    model = MODELS["gqa"]
    ours = build_decoder(model, build_reference(model))
    tokens, documents = pack_documents()
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % EOS
    before, after = (
        ours.compute_logits(tokens, documents)[0],
        ours.compute_logits(changed, documents)[0],
    )
    assert torch.equal(before[:3], after[:3])
    assert not (before[3:9] == after[3:9]).all(-1).any()
    assert torch.equal(before[9:], after[9:])
    assert (
        not (ours.compute_logits(tokens)[0, 9:] == ours.compute_logits(changed)[0, 9:])
        .all(-1)
        .any()
    )


def test_the_first_position_of_a_document_does_not_affect_its_logits(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations are relative, so without the restart the masked logits differ only by rounding."""
    ours = build_decoder(model, build_reference(model))
    tokens, documents = pack_documents()
    restarted = ours.compute_logits(tokens, documents)
    seen = []

    def compute_without_restart(
        config: ModelConfig, positions: Tensor, *rest: object
    ) -> tuple[Tensor, Tensor]:
        seen.append(positions)
        return rotations(config, torch.arange(positions.shape[-1]), *rest)

    rotations = decoder.compute_rope_cos_sin
    monkeypatch.setattr(decoder, "compute_rope_cos_sin", compute_without_restart)
    assert relative_error(ours.compute_logits(tokens, documents), restarted) < 1e-5
    assert torch.equal(seen[0], expected_positions())


def test_a_row_of_one_document_needs_no_mask(model: ModelConfig) -> None:
    ours = build_decoder(model, build_reference(model))
    tokens, documents = pack_documents()
    one = slice(1, 2)
    assert not documents[one].any()
    logits = ours.compute_logits(tokens[one])
    assert relative_error(ours.compute_logits(tokens[one], documents[one]), logits) < 1e-6
    targets = build_next_token_targets(tokens[one])
    assert torch.equal(build_next_token_targets(tokens[one], documents[one]), targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_row_of_eos_are_finite(dtype: torch.dtype) -> None:
    model = MODELS["gqa"]
    ours = build_decoder(model, build_reference(model)).to(dtype)
    tokens = torch.full((2, 24), EOS)
    documents = torch.arange(24).repeat(2, 1)
    logits = ours.compute_logits(tokens, documents)
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits, logits[:1, :1].expand_as(logits))
    assert mean_loss(ours, tokens, documents) == 0.0
    mean_loss(ours, tokens).backward()
    assert all(bool(torch.isfinite(weight.grad).all()) for weight in ours.parameters())


def test_masked_bf16_runs_in_bf16() -> None:
    model = MODELS["gqa"]
    ours = build_decoder(model, build_reference(model))
    tokens, documents = pack_documents()
    expected = ours.compute_logits(tokens, documents)
    logits = ours.to(torch.bfloat16).compute_logits(tokens, documents)
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, expected) < 0.05
