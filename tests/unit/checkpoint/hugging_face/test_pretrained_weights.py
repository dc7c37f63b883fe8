"""Hugging Face directories are read slice by slice; invalid ones are rejected with a message."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hlat.checkpoint.hugging_face.pretrained_weights import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    load_pretrained,
    validate_pretrained,
)
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder import Decoder
from tests.support.llama_models import MODELS, _seed, build_transformers_llama, build_weight_shards  # noqa: F401

transformers = pytest.importorskip("transformers")

MODEL = MODELS["gqa"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a directory that transformers saved in several files."""
    build_transformers_llama(MODEL).save_pretrained(tmp_path / "llama", max_shard_size="200KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 2
    return tmp_path / "llama"


def find_problems(folder: Path, model: ModelConfig = MODEL) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        validate_pretrained(str(folder), model)
    prefix = f"model.init_from={folder}: "
    assert all(problem.startswith(prefix) for problem in refused.value.problems)
    return [problem.removeprefix(prefix) for problem in refused.value.problems]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_logits_equal_transformers(tmp_path: Path, name: str, size: str) -> None:
    model, theirs = MODELS[name], build_transformers_llama(MODELS[name])
    theirs.save_pretrained(tmp_path / "llama", max_shard_size=size)
    assert (
        tmp_path / "llama" / (SAFE_WEIGHTS_NAME if size == "5GB" else SAFE_WEIGHTS_INDEX_NAME)
    ).is_file()
    ours = Decoder(model)
    load_pretrained(str(tmp_path / "llama"), model, build_weight_shards(model, ours))
    tokens = torch.randint(0, model.vocab_size, (2, 17))
    with torch.no_grad():
        found, expected = ours.compute_logits(tokens), theirs(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_rank_reads_its_slice_of_weights_and_no_moments(folder: Path) -> None:
    name, shape = "model.layers.1.mlp.down_proj.weight", (96, 104)
    part, corner, moment = torch.zeros(96, 52), torch.zeros(24, 3), torch.zeros(96, 104)
    load_pretrained(
        str(folder),
        MODEL,
        [
            StateShard(f"weights/{name}", shape, (0, 52), (96, 52), part),
            StateShard(f"weights/{name}", shape, (48, 101), (24, 3), corner),
            StateShard(f"exp_avg/{name}", shape, (0, 0), shape, moment),
        ],
    )
    file = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"][name]
    full = load_file(folder / file)[name]
    assert torch.equal(part, full[:, 52:])
    assert torch.equal(corner, full[48:72, 101:])
    assert not moment.any()


def test_weights_are_rounded_to_nearest_for_a_narrower_dtype(folder: Path) -> None:
    name, shape = "model.embed_tokens.weight", (1031, 96)
    narrow = torch.zeros(shape, dtype=torch.bfloat16)
    load_pretrained(
        str(folder), MODEL, [StateShard(f"weights/{name}", shape, (0, 0), shape, narrow)]
    )
    file = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"][name]
    assert torch.equal(narrow, load_file(folder / file)[name].bfloat16())


def test_the_fingerprint_depends_on_weights_and_not_on_files(tmp_path: Path) -> None:
    one, other = build_transformers_llama(MODEL), build_transformers_llama(MODEL)
    one.save_pretrained(tmp_path / "one")
    one.save_pretrained(tmp_path / "cut", max_shard_size="60KB")
    other.save_pretrained(tmp_path / "other")
    found = {
        name: load_pretrained(str(tmp_path / name), MODEL, []) for name in ("one", "cut", "other")
    }
    assert found["one"] == found["cut"] != found["other"]


def test_tensors_that_transformers_skips_are_skipped(tmp_path: Path) -> None:
    model = MODELS["tied"]
    build_transformers_llama(model).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SAFE_WEIGHTS_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    validate_pretrained(str(tmp_path), model)


def load_all(folder: Path, model: ModelConfig) -> list[str]:
    """Return the problems of loading every weight, without the directory."""
    shards = build_weight_shards(model, Decoder(model))
    with pytest.raises(ConfigError) as refused:
        load_pretrained(str(folder), model, shards)
    prefix = f"model.init_from={folder}: "
    return [problem.removeprefix(prefix) for problem in refused.value.problems]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_rejected(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    build_transformers_llama(MODEL).to(dtype).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SAFE_WEIGHTS_NAME)
    names = ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
    for name in names:
        tensors[name].view(-1)[7] = value
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    assert sorted(load_all(tmp_path, MODEL)) == [
        f"{name} contains NaN or infinity; use the weights of a run that did not diverge"
        for name in names
    ]


def test_a_different_tied_head_is_rejected(tmp_path: Path) -> None:
    model = MODELS["tied"]
    build_transformers_llama(model).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SAFE_WEIGHTS_NAME)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    load_pretrained(str(tmp_path), model, build_weight_shards(model, Decoder(model)))
    tensors["lm_head.weight"][-1, -1] += 1e-3
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    assert load_all(tmp_path, model) == [
        "config.json has tie_word_embeddings=true, but lm_head.weight differs from "
        "model.embed_tokens.weight; set tie_word_embeddings=false in config.json and "
        "model.tie_embeddings=false, or remove lm_head.weight"
    ]
    tensors["lm_head.weight"] = embedding[:-1].clone()
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    assert find_problems(tmp_path, model) == [
        "lm_head.weight has shape [130, 64], this run [131, 64]"
    ]


def test_a_missing_directory(tmp_path: Path) -> None:
    advice = "there is no such directory; specify a directory with config.json and *.safetensors"
    assert find_problems(tmp_path / "nowhere") == [advice]
    assert find_problems(Path("meta-llama/Llama-2-7b-hf")) == [
        f"{advice}; if it is a model of the hub: hf download meta-llama/Llama-2-7b-hf "
        "--local-dir Llama-2-7b-hf"
    ]


def test_a_directory_without_weights(tmp_path: Path) -> None:
    assert find_problems(tmp_path) == [
        f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; specify a Hugging Face directory of a supported family"
    ]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickle_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert find_problems(tmp_path) == [
        f"{name} is a pickle, which can run code when it is loaded; convert the directory where you "
        "trust it, with transformers: AutoModelForCausalLM.from_pretrained(DIR)"
        ".save_pretrained(NEW_DIR)"
    ]


def test_another_configuration_is_reported_before_the_tensors(folder: Path) -> None:
    model = dataclasses.replace(MODEL, hidden_size=192, num_layers=3)
    assert find_problems(folder, model) == [
        "config.json has num_hidden_layers=2, this run has model.num_layers=3; set model.num_layers=2",
        "config.json has hidden_size=96, this run has model.hidden_size=192; set model.hidden_size=96",
        "to set them all: model.num_layers=2 model.hidden_size=96",
    ]


def test_invalid_config_json(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    assert find_problems(folder) == ["config.json is not a JSON object"]
    (folder / "config.json").write_text("{")
    assert find_problems(folder)[0].startswith("config.json is not JSON (")
    (folder / "config.json").unlink()
    assert find_problems(folder) == ["config.json cannot be read (No such file or directory)"]


def test_missing_extra_and_misshapen_tensors_are_rejected(tmp_path: Path) -> None:
    build_transformers_llama(MODEL).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SAFE_WEIGHTS_NAME)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(96)
    tensors["model.norm.weight"] = torch.ones(95)
    tensors["lm_head.weight"] = torch.ones((1031, 96), dtype=torch.float8_e4m3fn)
    save_file(tensors, tmp_path / SAFE_WEIGHTS_NAME)
    assert find_problems(tmp_path) == [
        "it lacks model.layers.1.mlp.up_proj.weight",
        "it has model.layers.0.self_attn.q_proj.bias, which this model lacks",
        "model.norm.weight has shape [95], this run [96]",
        "lm_head.weight has dtype F8_E4M3; hlat reads F32, BF16, F16",
    ]


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    build_transformers_llama(MODEL).save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.ones(96)}, tmp_path / SAFE_WEIGHTS_NAME)
    assert find_problems(tmp_path) == [
        "it lacks model.embed_tokens.weight, model.layers.0.input_layernorm.weight, "
        "model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight, "
        "model.layers.0.self_attn.v_proj.weight and 15 more"
    ]


def test_missing_truncated_and_unindexed_files_are_rejected(folder: Path) -> None:
    index = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())
    name = "model.norm.weight"
    file = index["weight_map"][name]

    moved = index["weight_map"] | {name: index["weight_map"]["model.embed_tokens.weight"]}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": moved}))
    assert find_problems(folder) == [
        f"{SAFE_WEIGHTS_INDEX_NAME} lists {name} in {moved[name]}, which does not exist"
    ]

    outside = index["weight_map"] | {name: "../x.safetensors"}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": outside}))
    assert find_problems(folder) == [
        f"{SAFE_WEIGHTS_INDEX_NAME} names ../x.safetensors, which is outside of the directory"
    ]

    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text("{}")
    assert find_problems(folder) == [
        f"{SAFE_WEIGHTS_INDEX_NAME} has no weight_map from tensors to files"
    ]

    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-1])
    assert find_problems(folder)[0].startswith(f"{file} cannot be read (")
    (folder / file).unlink()
    assert find_problems(folder)[0].startswith(f"{file} cannot be read (")


def test_shapes_are_validated_without_torch(folder: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hlat.checkpoint.hugging_face.pretrained_weights import validate_pretrained\n"
        "from hlat.config.model import ModelConfig\n"
        f"validate_pretrained({str(folder)!r}, ModelConfig{dataclasses.astuple(MODEL)[:8]!r})\n"
        "print('looked')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "looked\n", done.stderr
