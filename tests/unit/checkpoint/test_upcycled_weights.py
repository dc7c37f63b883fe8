"""A mixture of experts that starts from a dense model computes what transformers computes for it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hlat.checkpoint.hugging_face.pretrained_weights import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    load_pretrained,
    validate_pretrained,
)
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.distributed.state_shard import StateShard
from hlat.model.computation_settings import replace_settings
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.families import FAMILIES
from hlat.model.mlp_spec import RouterScoring
from hlat.model.weight_initialization import compute_initial_values
from tests.support.llama_models import (
    MODELS,
    _seed,  # noqa: F401
    build_transformers_llama,
    build_weight_shards,
)
from tests.support.model_families import (
    TINY_MODELS,
    build_decoder,
    build_transformers_model,
    get_canonical_tensors,
    get_peer_tensors,
    transformers,
)

GQA = MODELS["gqa"]
FAMILY_MODELS = {
    name: replace_settings(
        TINY_MODELS[name],
        {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 131},
    )
    for name, family in FAMILIES.items()
    if family.fixed.get("mlp.kind") != "moe"
}
ROUTINGS: dict[str, dict[str, Any]] = {
    "top1": {"experts_per_token": 1},
    "top2": {},
    "all": {"experts_per_token": 4},
    "all, not normalized": {"experts_per_token": 4, "normalize_top_k": False},
    "sigmoid": {"scoring": RouterScoring.sigmoid, "routed_scale": 2.5, "bias_update_rate": 0.001},
    "virtual groups of 2": {"intermediate_size": 52, "num_experts": 8},
    "two virtual groups": {"intermediate_size": 26, "num_experts": 24, "experts_per_token": 8},
    "scaled virtual groups": {
        "intermediate_size": 26,
        "num_experts": 16,
        "experts_per_token": 4,
        "num_groups": 2,
        "scoring": RouterScoring.sigmoid,
        "routed_scale": 2.5,
    },
    "all, virtual groups": {"intermediate_size": 52, "num_experts": 4, "experts_per_token": 4},
    "dense first layer": {"num_dense_layers": 1},
    "every second layer": {"every": 2},
}
PREFIX = "model.layers.1.mlp"


def upcycle(dense: ModelConfig, noise: float | None = 0.0, **settings: Any) -> ModelConfig:
    """Return a mixture of four experts that starts from a dense model."""
    moe = {"num_experts": 4, "upcycling_noise": noise, **settings}
    paths = {f"mlp.moe.{name}": value for name, value in moe.items()}
    return replace_settings(dense, {"mlp.kind": "moe", "family": "mixtral", **paths})


def load(folder: Path, model: ModelConfig, seed: int = 7) -> Decoder:
    decoder = Decoder(model)
    load_pretrained(str(folder), model, build_weight_shards(model, decoder), seed)
    return decoder


def find_problems(folder: Path, model: ModelConfig) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        validate_pretrained(str(folder), model)
    return [
        problem.removeprefix(f"model.init_from={folder}: ") for problem in refused.value.problems
    ]


@torch.no_grad()
def assert_equal_logits(decoder: Decoder, peer: torch.nn.Module) -> None:
    """Compare the logits of a decoder with those of a model of transformers, in fp32."""
    tokens = torch.randint(0, decoder.config.vocab_size, (2, 23))
    found, expected = decoder.compute_logits(tokens), peer(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def get_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Return the weights by canonical name, in their canonical shapes."""
    shapes = {spec.name: spec.shape for spec in list_parameter_specs(decoder.config)}
    views = get_canonical_tensors(decoder)
    return {name: view.reshape(shapes[name]) for name, view in views.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a directory of several files with a dense Llama model."""
    build_transformers_llama(GQA).save_pretrained(tmp_path / "llama", max_shard_size="200KB")
    return tmp_path / "llama"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_logits_equal_the_dense_model(folder: Path, routing: str) -> None:
    assert (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()
    model = upcycle(GQA, **ROUTINGS[routing])
    validate_pretrained(str(folder), model)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert_equal_logits(load(folder, model), peer)


@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_logits_equal_every_dense_family(tmp_path: Path, family: str) -> None:
    dense = FAMILY_MODELS[family]
    peer = build_transformers_model(dense)
    peer.save_pretrained(tmp_path)
    model = upcycle(dense, num_experts=6, experts_per_token=3, intermediate_size=32)
    assert_equal_logits(load(tmp_path, model), peer)


@pytest.mark.parametrize("name", ["tied", "head_dim_48"])
def test_bf16_files(tmp_path: Path, name: str) -> None:
    build_transformers_llama(MODELS[name]).bfloat16().save_pretrained(tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    model = upcycle(MODELS[name])
    assert_equal_logits(load(tmp_path, model), peer)
    tensors, saved = get_tensors(load(tmp_path, model)), load_file(tmp_path / SAFE_WEIGHTS_NAME)
    assert torch.equal(
        tensors[f"{PREFIX}.experts.3.up_proj.weight"], saved[f"{PREFIX}.up_proj.weight"].float()
    )


def test_transformers_compute_the_same_with_experts(tmp_path: Path) -> None:
    """Qwen3 and the Qwen3-MoE model that starts from it have equal logits in transformers."""
    dense = FAMILY_MODELS["qwen3"]
    peer = build_transformers_model(dense)
    peer.save_pretrained(tmp_path)
    settings = {"intermediate_size": 48, "num_experts": 6, "experts_per_token": 4}
    model = dataclasses.replace(upcycle(dense, **settings), family="qwen3_moe")
    tensors = get_tensors(load(tmp_path, model))
    sparse = build_transformers_model(model)
    with torch.no_grad():
        for name, tensor in get_peer_tensors(sparse).items():
            tensor.copy_(tensors[name])
    tokens = torch.randint(0, model.vocab_size, (2, 23))
    with torch.no_grad():
        found, expected = sparse(tokens).logits, peer(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_routers_have_the_usual_initial_values(folder: Path) -> None:
    name = f"{PREFIX}.gate.weight"
    for group_size in (1, 2):
        model = upcycle(GQA, num_experts=6, intermediate_size=104 // group_size)
        spec = next(spec for spec in list_parameter_specs(model) if spec.name == name)
        rows = torch.from_numpy(compute_initial_values(spec, model, 7, (0, 0), spec.shape))
        expected = rows[: 6 // group_size].repeat_interleave(group_size, 0)
        assert torch.equal(get_tensors(load(folder, model))[name], expected)
        part = torch.zeros(3, 5)
        shard = StateShard(f"weights/{name}", spec.shape, (1, 9), (3, 5), part)
        empty = StateShard(f"weights/{name}", spec.shape, (5, 0), (0, 96), torch.zeros(0, 96))
        load_pretrained(str(folder), model, [shard, empty], 7)
        assert torch.equal(part, expected[1:4, 9:14])


def test_noise_is_relative_and_differs_between_experts(folder: Path) -> None:
    exact = get_tensors(load(folder, upcycle(GQA)))
    tensors = get_tensors(load(folder, upcycle(GQA, 0.05)))
    others = get_tensors(load(folder, upcycle(GQA, 0.05), seed=8))
    assert tensors.keys() == exact.keys()
    for name, tensor in tensors.items():
        if ".experts." not in name:
            is_router = name.endswith(".gate.weight")
            assert torch.equal(tensor, exact[name])
            assert torch.equal(tensor, others[name]) != is_router
            continue
        assert not torch.equal(tensor, others[name])
        noise = tensor / exact[name] - 1
        assert abs(float(noise.std()) - 0.05) < 4 * 0.05 / (2 * noise.numel()) ** 0.5
        assert abs(float(noise.mean())) < 4 * 0.05 / noise.numel() ** 0.5
    names = [f"{PREFIX}.experts.{expert}.up_proj.weight" for expert in range(4)]
    noise = torch.stack([(tensors[name] / exact[name] - 1).flatten() for name in names])
    correlations = torch.corrcoef(noise) - torch.eye(4)
    assert float(correlations.abs().max()) < 5 / noise.shape[1] ** 0.5


@pytest.mark.parametrize("matrix", ["gate_proj", "down_proj"])
def test_slices_equal_those_of_the_whole_tensor(folder: Path, matrix: str) -> None:
    model = upcycle(GQA, 0.1, intermediate_size=26, num_experts=8, experts_per_token=4)
    name = f"{PREFIX}.experts.6.{matrix}.weight"
    whole = get_tensors(load(folder, model))[name]
    part = torch.zeros(7, 11)
    shard = StateShard(f"weights/{name}", tuple(whole.shape), (5, 13), (7, 11), part)
    load_pretrained(str(folder), model, [shard], 7)
    assert torch.equal(part, whole[5:12, 13:24])


def test_the_fingerprint_is_that_of_the_dense_model(folder: Path) -> None:
    dense = load_pretrained(str(folder), GQA, [])
    assert load_pretrained(str(folder), upcycle(GQA, 0.1), []) == dense


def test_weights_are_rounded_once_to_a_narrower_dtype(folder: Path) -> None:
    model, name = upcycle(GQA, 0.1, routed_scale=2.5), f"{PREFIX}.experts.2.down_proj.weight"
    whole = get_tensors(load(folder, model))[name]
    narrow = torch.zeros(whole.shape, dtype=torch.bfloat16)
    shape = tuple(whole.shape)
    shard = StateShard(f"weights/{name}", shape, (0, 0), shape, narrow)
    load_pretrained(str(folder), model, [shard], 7)
    assert torch.equal(narrow, whole.bfloat16())


def test_a_dense_directory_needs_the_setting(folder: Path) -> None:
    missing = (
        "it is a dense model, and this run has model.mlp.kind=moe; set model.mlp.moe."
        "upcycling_noise=0 to start each expert as a copy of the dense network, or "
        "model.mlp.kind=dense"
    )
    assert find_problems(folder, upcycle(GQA, None)) == [missing]
    wide = dataclasses.replace(GQA, intermediate_size=112)
    assert find_problems(folder, upcycle(wide, None)) == [
        missing,
        "config.json has intermediate_size=104, this run has model.intermediate_size=112; set "
        "model.intermediate_size=104",
    ]


def test_other_dense_models_are_refused(folder: Path) -> None:
    wide = upcycle(dataclasses.replace(GQA, intermediate_size=112))
    assert find_problems(folder, wide) == [
        "config.json has intermediate_size=104, this run has model.intermediate_size=112; set "
        "model.intermediate_size=104"
    ]
    normalized = upcycle(replace_settings(GQA, {"attention.qk_norm": True}))
    assert find_problems(folder, normalized) == [
        "config.json has model.attention.qk_norm=false, this run has model.attention.qk_norm=true; "
        "set model.attention.qk_norm=false"
    ]


def test_a_directory_with_experts_refuses_the_setting(tmp_path: Path) -> None:
    model = upcycle(GQA, None)
    peer = build_transformers_model(model)
    peer.save_pretrained(tmp_path)
    assert_equal_logits(load(tmp_path, model), peer)
    assert_equal_logits(build_decoder(model, peer), peer)
    assert find_problems(tmp_path, upcycle(GQA, 0.5)) == [
        "config.json has model_type=mixtral, a model with experts, but model.mlp.moe."
        "upcycling_noise=0.5 starts from a dense model; set model.mlp.moe.upcycling_noise=null"
    ]


def test_messages_name_the_tensors_of_the_files(tmp_path: Path) -> None:
    build_transformers_llama(GQA).save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / SAFE_WEIGHTS_NAME), f"{PREFIX}.up_proj.weight"
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, upcycle(GQA, 0.1))
    assert refused.value.problems == (
        f"model.init_from={tmp_path}: {name} contains NaN or infinity; use the weights of a run "
        "that did not diverge",
    )
    del tensors[name]
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    assert find_problems(tmp_path, upcycle(GQA)) == [f"it lacks {name}"]


def test_a_different_tied_head_is_refused(tmp_path: Path) -> None:
    model = MODELS["tied"]
    build_transformers_llama(model).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SAFE_WEIGHTS_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    load(tmp_path, upcycle(model))
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from"):
        load(tmp_path, upcycle(model))


def test_unknown_models_are_refused_as_without_experts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert find_problems(folder, upcycle(GQA)) == find_problems(folder, GQA)


def test_shapes_are_validated_without_torch(folder: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hlat.checkpoint.hugging_face.pretrained_weights import validate_pretrained\n"
        "from hlat.config.model import ModelConfig\n"
        f"model = ModelConfig{dataclasses.astuple(GQA)[:8]!r}\n"
        "model.mlp.kind, model.mlp.moe.upcycling_noise = 'moe', 0.0\n"
        f"validate_pretrained({str(folder)!r}, model)\n"
        "print('valid')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "valid\n", done.stderr
