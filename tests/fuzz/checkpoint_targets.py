"""Readers of checkpoints and of Hugging Face directories."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from omegaconf import OmegaConf
from safetensors.torch import save

from hlat.checkpoint import checkpoint_listing, checkpoint_store
from hlat.checkpoint.checkpoint_directory import load_checkpoint_root
from hlat.checkpoint.checkpoint_lookup import find_checkpoint_root
from hlat.checkpoint.hugging_face import pretrained_weights
from hlat.checkpoint.hugging_face.pretrained_files import load_pretrained_files
from hlat.checkpoint.nxd_rank_files import NxdRankFiles
from hlat.checkpoint.training_state import TrainingState
from hlat.config import compose
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.families import FAMILY_NAMES, hugging_face_config
from tests.fuzz.fuzzer import Target
from tests.fuzz.mutations import (
    either,
    mutate_bytes,
    mutate_json,
    mutate_safetensors,
    mutate_text,
)

STEP = "checkpoints/step_00000010"
MANIFEST, STATE, RANK_FILE = "manifest.json", "state.json", "rank_00000.safetensors"
CONFIG, WEIGHTS, SHARD = "config.json", "model.safetensors", "model-1.safetensors"
NXD = "dp_rank_00_tp_rank_00_pp_rank_00.pt"
INDEX = "model.safetensors.index.json"
MODEL = ModelConfig(
    name="x",
    family="llama",
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
)


def _build_checkpoint_file(name: str) -> Callable[[Path], list[bytes]]:
    """Return a function that writes a checkpoint, and returns the content of one of its files."""

    def set_up(directory: Path) -> list[bytes]:
        halves = [((4 * i, 0), torch.ones(4, 4)) for i in range(2)]
        shards = [StateShard("weights/a", (8, 4), at, (4, 4), half) for at, half in halves]
        shards.append(StateShard("exp_avg/b", (3,), (0,), (3,), torch.zeros(3)))
        state = {"step": 10, "tokens": 100, "data": {}, "fixed": {"model.name": "x"}}
        state["adjustable"] = {"optimizer.lr": 1e-3}
        checkpoint_store.save_checkpoint(directory / "checkpoints", 10, shards, state)
        return [(directory / STEP / name).read_bytes()]

    return set_up


def _read_manifest(directory: Path, content: bytes) -> object:
    path = directory / STEP
    (path / MANIFEST).write_bytes(content)
    (path / "COMMITTED").write_text(hashlib.sha256(content).hexdigest())
    checkpoint_listing.list_checkpoints(directory)
    checkpoint_store.load_manifest(path)
    return _load_tensors(path)


def _load_tensors(path: Path) -> torch.Tensor:
    shard = StateShard("weights/a", (8, 4), (0, 0), (8, 4), torch.zeros(8, 4))
    checkpoint_store.load_checkpoint(path, [shard])
    return shard.tensor


def _read_rank_file(directory: Path, content: bytes) -> object:
    (directory / STEP / RANK_FILE).write_bytes(content)
    return _load_tensors(directory / STEP)


def _read_state(directory: Path, content: bytes) -> object:
    path = directory / STEP
    (path / STATE).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_bytes())
    record = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"][STATE] = record
    _read_manifest(directory, json.dumps(manifest).encode())
    return TrainingState.from_json(checkpoint_store.load_state_json(path))


def _build_hugging_face(directory: Path, weights: str) -> None:
    """Write the weights and the configuration of `MODEL`."""
    specs = list_parameter_specs(MODEL)
    config = hugging_face_config.build_hf_config(MODEL, 64, 0, Dtype.fp32)
    (directory / CONFIG).write_text(json.dumps(config))
    (directory / weights).write_bytes(save({spec.name: torch.ones(spec.shape) for spec in specs}))


def _build_weights(directory: Path) -> list[bytes]:
    _build_hugging_face(directory, WEIGHTS)
    return [(directory / WEIGHTS).read_bytes()]


def _build_index(directory: Path) -> list[bytes]:
    _build_hugging_face(directory, SHARD)
    weight_map = {spec.name: SHARD for spec in list_parameter_specs(MODEL)}
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()]


def _build_configs(directory: Path) -> list[bytes]:
    presets = compose.load_model_presets()
    configs = []
    for fields in [vars(MODEL), *(presets.get(f"{family}_tiny") for family in FAMILY_NAMES)]:
        if fields is not None:
            model = cast(ModelConfig, OmegaConf.to_object(OmegaConf.merge(ModelConfig, fields)))
            configs.append(hugging_face_config.build_hf_config(model, 64, 0, Dtype.bf16))
    return [json.dumps(config).encode() for config in configs]


def _read_config(directory: Path, content: bytes) -> object:
    (directory / CONFIG).write_bytes(content)
    config = pretrained_weights._load_json(directory / CONFIG)
    hugging_face_config.find_hf_config_mismatches(MODEL, config)
    return hugging_face_config.parse_hf_config(config, CONFIG)


def _read_pretrained(name: str) -> Callable[[Path, bytes], object]:
    def read(directory: Path, content: bytes) -> object:
        (directory / name).write_bytes(content)
        pretrained_weights.validate_pretrained(str(directory), MODEL)
        tensors = [(spec, torch.zeros(spec.shape)) for spec in list_parameter_specs(MODEL)]
        shards = [
            StateShard(f"weights/{spec.name}", spec.shape, (0,) * tensor.ndim, spec.shape, tensor)
            for spec, tensor in tensors
        ]
        return pretrained_weights.load_pretrained(str(directory), MODEL, shards)

    return read


def _build_generation_config(directory: Path) -> list[bytes]:
    (directory / "tokenizer.json").write_text("{}")
    return [b'{"eos_token_id": [1, 2], "pad_token_id": 3, "temperature": 0.5, "do_sample": true}']


def _read_generation_config(directory: Path, content: bytes) -> object:
    (directory / "generation_config.json").write_bytes(content)
    files = load_pretrained_files(str(directory), None, hashlib.sha256(b"{}").hexdigest())
    return files.build_generation_config(1)


def _read_location(directory: Path, content: bytes) -> object:
    (directory / "checkpoints_are_in.txt").write_bytes(content)
    root = load_checkpoint_root(directory)
    return find_checkpoint_root(directory) if isinstance(root, Path) else root


def _build_locations(directory: Path) -> list[bytes]:
    (directory / "x").mkdir()
    return [f"{directory / 'x'}\n".encode(), f"file://{directory}/x\n".encode(), b"memory://x/y\n"]


def _build_nxd_file(directory: Path) -> list[bytes]:
    torch.save({"a": torch.ones(4, 2), "b": torch.zeros(3, dtype=torch.bfloat16)}, directory / NXD)
    return [(directory / NXD).read_bytes()]


def _read_nxd_file(directory: Path, content: bytes) -> object:
    (directory / NXD).write_bytes(content)
    files = NxdRankFiles(directory, 1)
    infos = files.load_tensor_infos(NXD)
    return [files.load_tensor(NXD, key, info).sum().item() for key, info in infos.items()]


TARGETS = [
    Target(
        "checkpoint_manifest",
        _build_checkpoint_file(MANIFEST),
        _read_manifest,
        either(mutate_json, mutate_json, mutate_bytes),
        "step_00000010|manifest.json",
    ),
    Target(
        "checkpoint_state",
        _build_checkpoint_file(STATE),
        _read_state,
        either(mutate_json, mutate_bytes),
        STATE,
    ),
    Target(
        "checkpoint_tensors",
        _build_checkpoint_file(RANK_FILE),
        _read_rank_file,
        either(mutate_safetensors, mutate_bytes),
        RANK_FILE,
    ),
    Target("hf_config", _build_configs, _read_config, either(mutate_json, mutate_bytes), CONFIG),
    Target(
        "hf_weights",
        _build_weights,
        _read_pretrained(WEIGHTS),
        either(mutate_safetensors, mutate_bytes),
        "model.init_from=",
    ),
    Target(
        "hf_index",
        _build_index,
        _read_pretrained(INDEX),
        either(mutate_json, mutate_bytes),
        "model.init_from=",
    ),
    Target(
        "hf_generation_config",
        _build_generation_config,
        _read_generation_config,
        either(mutate_json, mutate_bytes),
        "generation_config.json",
    ),
    Target("nxd_rank_file", _build_nxd_file, _read_nxd_file, mutate_bytes, "pp_rank_00"),
    Target(
        "checkpoint_location",
        _build_locations,
        _read_location,
        either(mutate_text, mutate_bytes),
        "checkpoints_are_in.txt",
    ),
]
