"""Exports load in transformers, and are complete or absent."""

import builtins
import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.hugging_face import weight_export
from hlat.checkpoint.hugging_face.pretrained_weights import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    load_pretrained,
)
from hlat.checkpoint.hugging_face.weight_export import export_weights, split_into_shards
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.families.hugging_face_config import build_hf_config
from tests.support.llama_models import MODELS, _seed, build_weight_shards  # noqa: F401

transformers = pytest.importorskip("transformers")

MODEL = MODELS["mha"]


def llama(model: ModelConfig) -> Decoder:
    ours = Decoder(model)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return ours


def exported(
    folder: Path,
    model: ModelConfig,
    saved: list[StateShard],
    dtype: Dtype = Dtype.fp32,
    max_bytes: int = 10**9,
    on_file_written: Callable[[Any], None] = lambda _: None,
) -> Path:
    checkpoint = checkpoint_store.save_checkpoint(folder / "checkpoints", 1, saved, {})
    documents = {"config.json": json.dumps(build_hf_config(model, 32, 7, dtype)).encode()}
    files = split_into_shards(model, dtype, max_bytes)
    export_weights(folder / "out", checkpoint, files, dtype, documents, on_file_written)
    return folder / "out"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "checkpoints")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_bytes", [10**9, 60_000])
def test_transformers_loads_every_weight_and_gives_the_same_logits(
    tmp_path: Path, name: str, max_bytes: int
) -> None:
    model, ours = MODELS[name], llama(MODELS[name])
    out = exported(tmp_path, model, build_weight_shards(model, ours), max_bytes=max_bytes)
    assert (out / (SAFE_WEIGHTS_NAME if max_bytes == 10**9 else SAFE_WEIGHTS_INDEX_NAME)).is_file()
    theirs, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    tokens = torch.randint(0, model.vocab_size, (2, 17))
    with torch.no_grad():
        found, expected = theirs(tokens).logits, ours.compute_logits(tokens)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    continued = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4)
    assert continued.shape[1] > 17


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_exact(tmp_path: Path, name: str) -> None:
    model, ours, again = MODELS[name], llama(MODELS[name]), Decoder(MODELS[name])
    out = exported(tmp_path, model, build_weight_shards(model, ours), max_bytes=60_000)
    load_pretrained(str(out), model, build_weight_shards(model, again))
    for one, other in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_files_have_at_most_the_requested_size_and_are_indexed(tmp_path: Path) -> None:
    written: list[Any] = []
    out = exported(
        tmp_path,
        MODEL,
        build_weight_shards(MODEL, llama(MODEL)),
        Dtype.bf16,
        30_000,
        written.append,
    )
    index = json.loads((out / SAFE_WEIGHTS_INDEX_NAME).read_text())
    files = {path.name: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    assert list(files) == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert index["weight_map"] == {name: file for file in files for name in files[file]}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in files.values()]
    assert max(sizes) <= 30_000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert [(file.name, file.num_bytes) for file in written] == list(zip(files, sizes, strict=True))
    assert {t.dtype for tensors in files.values() for t in tensors.values()} == {torch.bfloat16}
    with safe_open(out / written[0].name, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_parameter_above_the_file_size_has_a_separate_file() -> None:
    files = split_into_shards(MODEL, Dtype.fp32, 1)
    assert [len(file.parameters) for file in files] == [1] * len(list_parameter_specs(MODEL))


def test_wide_weights_are_rounded_to_nearest(tmp_path: Path) -> None:
    wide = llama(MODEL)
    out = exported(tmp_path, MODEL, build_weight_shards(MODEL, wide), Dtype.bf16)
    found = load_file(out / SAFE_WEIGHTS_NAME)["model.embed_tokens.weight"]
    assert torch.equal(found, wide.embed_tokens.weight.bfloat16())


def test_an_existing_output_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as refused:
        exported(tmp_path, MODEL, build_weight_shards(MODEL, llama(MODEL)))
    assert str(refused.value) == (
        f"output={tmp_path / 'out'} exists already; specify a new directory, or remove it"
    )
    assert left(tmp_path) == ["out"]


def test_insufficient_disk_space_is_reported_before_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    big = ModelConfig("big", 2, 192, 352, 4, 2, 1031)
    with pytest.raises(ConfigError) as refused:
        exported(tmp_path, big, build_weight_shards(big, llama(big)))
    assert str(refused.value) == (f"output={tmp_path / 'out'} needs 4 MB, the disk has 1 MB free")
    assert left(tmp_path) == []


@pytest.mark.parametrize("call", range(4))
def test_a_full_disk_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    checkpoint = checkpoint_store.save_checkpoint(
        tmp_path / "checkpoints", 1, build_weight_shards(MODEL, llama(MODEL)), {}
    )
    real, calls = builtins.open, iter(range(100))

    def full(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if "x" in mode and next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *rest, **named)

    monkeypatch.setattr(builtins, "open", full)
    files = split_into_shards(MODEL, Dtype.fp32, 300_000)
    assert len(files) == 2
    with pytest.raises(OSError, match="No space left"):
        export_weights(
            tmp_path / "out", checkpoint, files, Dtype.fp32, {"config.json": b"{}"}, lambda _: None
        )
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, Dtype.fp32), (math.inf, Dtype.bf16), (3.4e38, Dtype.bf16)]
)
def test_non_finite_weights_are_exported_only_with_consent(
    tmp_path: Path, value: float, dtype: Dtype
) -> None:
    saved = build_weight_shards(MODEL, llama(MODEL))
    shard = next(shard for shard in saved if shard.name.endswith("layers.1.mlp.down_proj.weight"))
    shard.tensor.detach()[2, 1] = value
    checkpoint = checkpoint_store.save_checkpoint(tmp_path / "checkpoints", 1, saved, {})
    arguments = (checkpoint, split_into_shards(MODEL, dtype, 10**9), dtype, {}, lambda _: None)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight in .* has 1 of "):
        export_weights(tmp_path / "out", *arguments)
    assert left(tmp_path) == []
    export_weights(tmp_path / "out", *arguments, allow_non_finite=True)
    tensors = load_file(tmp_path / "out" / SAFE_WEIGHTS_NAME)
    assert not tensors["model.layers.1.mlp.down_proj.weight"][2, 1].isfinite()


def killed_while_writing(tmp_path: Path, checkpoint: Path) -> None:
    child = os.fork()
    if child == 0:
        files = split_into_shards(MODEL, Dtype.fp32, 60_000)
        export_weights(
            tmp_path / "out", checkpoint, files, Dtype.fp32, {"config.json": b"{}"},
            lambda _: os.kill(os.getpid(), signal.SIGKILL),
        )  # fmt: skip
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_killed_export_leaves_no_directory_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    saved = build_weight_shards(MODEL, llama(MODEL))
    killed_while_writing(
        tmp_path, checkpoint_store.save_checkpoint(tmp_path / "checkpoints", 1, saved, {})
    )
    assert left(tmp_path) == [".tmp-out"]
    assert [path.suffix for path in (tmp_path / ".tmp-out").iterdir()] == [".safetensors"]
    out = exported(tmp_path, MODEL, saved)
    assert left(tmp_path) == ["out"]
    assert left(out) == ["config.json", SAFE_WEIGHTS_NAME]


def test_two_exports_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    saved = build_weight_shards(MODEL, llama(MODEL))
    checkpoint = checkpoint_store.save_checkpoint(tmp_path / "checkpoints", 1, saved, {})
    refusals = []

    def second(_: object) -> None:
        with pytest.raises(ConfigError) as refused:
            export_weights(
                tmp_path / "out",
                checkpoint,
                split_into_shards(MODEL, Dtype.fp32, 10**9),
                Dtype.fp32,
                {},
                print,
            )
        refusals.append(str(refused.value))

    out = exported(tmp_path, MODEL, saved, on_file_written=second)
    assert refusals == [f"output={out}: another process is writing it; wait until it has finished"]
    assert left(out) == ["config.json", SAFE_WEIGHTS_NAME]


def test_only_one_file_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    real = weight_export.safetensors_file.serialize_tensors

    def watched(tensors: Any, metadata: Any) -> Any:
        held.append(sum(values.nbytes for _, values in tensors.values()))
        return real(tensors, metadata)

    checkpoint = checkpoint_store.save_checkpoint(
        tmp_path / "checkpoints", 1, build_weight_shards(MODEL, llama(MODEL)), {}
    )
    monkeypatch.setattr(weight_export.safetensors_file, "serialize_tensors", watched)
    files = split_into_shards(MODEL, Dtype.fp32, 60_000)
    export_weights(tmp_path / "out", checkpoint, files, Dtype.fp32, {}, lambda _: None)
    assert len(held) == len(files)
    assert max(held) <= 60_000
