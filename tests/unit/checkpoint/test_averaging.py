"""Averages equal the float64 mean of verified checkpoints of one model, or are rejected."""

import builtins
import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hlat.checkpoint import averaging, checkpoint_lookup, checkpoint_store
from hlat.checkpoint.averaging import (
    build_default_output,
    load_weighted_checkpoint,
    select_checkpoints,
    validate_same_model,
    write_average,
)
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.training_state import TrainingState
from hlat.config.config_errors import ConfigError
from hlat.config.precision import Dtype
from hlat.distributed.state_shard import StateShard

SHAPES = {"embedding": (37, 16), "norm": (16,), "head": (9, 16)}
FIXED = {"model.num_layers": 2}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def split_rows(name: str, values: torch.Tensor, rows: int) -> list[StateShard]:
    """Split a tensor into slices of `rows` rows."""
    shape, rest = tuple(values.shape), (0,) * (values.dim() - 1)
    parts = values.split(rows)
    return [
        StateShard(name, shape, (i * rows, *rest), tuple(part.shape), part)
        for i, part in enumerate(parts)
    ]


def save(
    run: Path,
    step: int,
    dtype: torch.dtype = torch.float32,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    fixed: dict[str, Any] = FIXED,
    rows: int = 100,
) -> Path:
    """Save a checkpoint with weights of many magnitudes, moments and a data state."""
    shards = []
    for name, shape in shapes.items():
        values = (torch.randn(shape) * 10.0 ** torch.randint(-6, 6, shape)).to(dtype)
        for kind in ("weights", "exp_avg"):
            shards += split_rows(f"{kind}/{name}", values, rows)
    data = {"fingerprint": {"data.tokenizer": "aa"}, "streams": {"0": [1]}}
    state = TrainingState(step, step * 100, data, fixed, {"precision.param_dtype": "fp32"})
    return checkpoint_store.save_checkpoint(run / "checkpoints", step, shards, state.to_json())


def parts(
    paths: list[Path], weights: list[float] | None = None
) -> list[averaging.WeightedCheckpoint]:
    given = weights or [1.0] * len(paths)
    return [
        load_weighted_checkpoint(path, w, lambda _: None)
        for path, w in zip(paths, given, strict=True)
    ]


def written(
    folder: Path, paths: list[Path], weights: list[float] | None = None, dtype: Dtype | None = None
) -> Path:
    write_average(folder / "out", parts(paths, weights), dtype, lambda _: None)
    return folder / "out"


def reference(paths: list[Path], weights: list[float], name: str) -> "np.ndarray[Any, Any]":
    """Return numpy's float64 mean of the tensors that the safetensors library reads."""
    whole = [load_file(path / "rank_00000.safetensors")[name].double().numpy() for path in paths]
    return np.average(np.stack(whole), axis=0, weights=weights)


def assert_within_one_ulp(found: torch.Tensor, expected: "np.ndarray[Any, Any]") -> None:
    nearest = torch.from_numpy(expected).to(found.dtype)
    away = torch.full_like(nearest, float("inf"))
    ulp = (torch.nextafter(nearest.abs(), away) - nearest.abs()).double()
    assert bool(((found.double() - torch.from_numpy(expected)).abs() <= ulp).all())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [None, Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 3.0, 0.7]])
def test_the_mean_is_that_of_float64(
    tmp_path: Path, stored: torch.dtype, dtype: Dtype | None, weights: list[float]
) -> None:
    paths = [save(tmp_path, step, stored) for step in (1, 2, 3)]
    out = written(tmp_path, paths, weights, dtype)
    found = load_file(out / "rank_00000.safetensors")
    assert set(found) == {f"weights/{name}" for name in SHAPES}
    target = {None: stored, Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}[dtype]
    for name, values in found.items():
        assert values.dtype == target
        assert_within_one_ulp(values, reference(paths, weights, name))


def test_the_mean_of_equal_values_is_exact(tmp_path: Path) -> None:
    """Average copies of a checkpoint: the mean is exact even if the sum rounds."""
    paths = [save(tmp_path, 1)]
    paths += [Path(str(paths[0]).replace("checkpoints", f"copy_{i}")) for i in (1, 2)]
    for path in paths[1:]:
        path.parent.mkdir()
        subprocess.run(["cp", "-r", paths[0], path], check=True)
    found = load_file(written(tmp_path, paths) / "rank_00000.safetensors")
    for name, values in load_file(paths[0] / "rank_00000.safetensors").items():
        if name.startswith("weights/"):
            assert torch.equal(found[name], values)


def test_slices_and_blocks_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run, rows in (("whole", 100), ("sliced", 5)):
        torch.manual_seed(1)
        paths = [save(tmp_path / run, step, rows=rows) for step in (1, 2)]
        written(tmp_path / run, paths)
    monkeypatch.setattr(averaging, "_BLOCK_ELEMENTS", 40)
    (tmp_path / "blocks").mkdir()
    written(tmp_path / "blocks", paths)
    files = [tmp_path / run / "out/rank_00000.safetensors" for run in ("whole", "sliced", "blocks")]
    assert len({file.read_bytes() for file in files}) == 1


def test_an_average_is_a_checkpoint_that_records_its_sources(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (5, 10)]
    out = written(tmp_path, paths, [1.0, 3.0])
    checkpoint_store.verify_checkpoint(out)
    assert checkpoint_lookup.find_checkpoint(out, None) == (out, [])
    state = TrainingState.from_json(checkpoint_store.load_state_json(out))
    assert (state.step, state.tokens, state.fixed) == (10, 1000, FIXED)
    assert state.weights_only
    assert state.data == {"fingerprint": {"data.tokenizer": "aa"}}
    assert state.averaged_from == [
        {
            "path": str(path),
            "step": step,
            "manifest_sha256": hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest(),
            "weight": weight,
        }
        for path, step, weight in zip(paths, (5, 10), (1.0, 3.0), strict=True)
    ]
    assert {file.name for file in out.iterdir()} == {file.name for file in paths[0].iterdir()}
    again = written(out, [out, paths[0]])
    checkpoint_store.verify_checkpoint(again)


def test_the_default_name_has_steps_and_weights(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (5, 10)]
    names = [
        build_default_output(tmp_path, parts(paths, weights), dtype)
        .relative_to(tmp_path)
        .as_posix()
        for weights, dtype in (([1.0, 1.0], None), ([1.0, 2.5], None), ([1.0, 1.0], Dtype.bf16))
    ]
    assert names == [
        "averages/step_00000010_of_5_10",
        "averages/step_00000010_of_5x1_10x2.5",
        "averages/step_00000010_of_5_10_bf16",
    ]
    with pytest.raises(ConfigError, match="is too long; give output=DIR"):
        build_default_output(tmp_path, parts(paths * 50), None)


def test_steps_are_found_among_checkpoints_and_milestones(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoints").rename(tmp_path / "milestones")
    for step in (10, 15):
        save(tmp_path, step)
    found = select_checkpoints(tmp_path, None, 3)
    assert [path.relative_to(tmp_path).parts[0] for path in found] == [
        "milestones", "checkpoints", "checkpoints",
    ]  # fmt: skip
    assert select_checkpoints(tmp_path, [15, 5], None) == [found[2], found[0]][::-1]
    for steps, last, sentence in (
        ([5, 7], None, f"steps=7: {tmp_path} has no such checkpoint, only 5, 10, 15"),
        (None, 4, f"last=4: {tmp_path} has only 3 checkpoints: 5, 10, 15"),
    ):
        with pytest.raises(ConfigError) as refused:
            select_checkpoints(tmp_path, steps, last)
        assert str(refused.value) == sentence


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_rejected_by_name(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 5)
    content = bytearray((path / file).read_bytes())
    content[-1] ^= 1
    (path / file).write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=f"step_00000005/{file} d"):
        load_weighted_checkpoint(path, 1.0, lambda _: None)


OTHER_MODELS: list[tuple[dict[str, Any], str]] = [
    (
        {"fixed": {"model.num_layers": 3}},
        "are of different models: 'model.num_layers' is 2 in the first and 3 in the second",
    ),
    (
        {"fixed": {}},
        "are of different models: 'model.num_layers' is 2 in the first and None in the second",
    ),
    (
        {"shapes": {"norm": (16,), "head": (9, 16)}},
        "are of different models: 'weights/embedding' is (37, 16) in the first and None in the second",
    ),
    (
        {"shapes": SHAPES | {"norm": (8,)}},
        "are of different models: 'weights/norm' is (16,) in the first and (8,) in the second",
    ),
    (
        {"dtype": torch.bfloat16},
        "have different dtypes: 'weights/embedding' is 'F32' in the first and 'BF16' in the second; "
        "set the output dtype with dtype=",
    ),
]


@pytest.mark.parametrize(("other", "sentence"), OTHER_MODELS)
def test_checkpoints_of_other_models_are_rejected(
    tmp_path: Path, other: dict[str, Any], sentence: str
) -> None:
    paths = [save(tmp_path, 5), save(tmp_path, 10, **other)]
    with pytest.raises(ConfigError) as refused:
        validate_same_model(parts(paths), None)
    assert str(refused.value) == f"{paths[0]} and {paths[1]} {sentence}"


def test_dtypes_may_differ_where_one_is_given(tmp_path: Path) -> None:
    paths = [save(tmp_path, 5), save(tmp_path, 10, torch.bfloat16)]
    validate_same_model(parts(paths), Dtype.fp32)
    out = load_file(written(tmp_path, paths, dtype=Dtype.fp32) / "rank_00000.safetensors")
    for name, values in out.items():
        assert_within_one_ulp(values, reference(paths, [1, 1], name))


def forge(path: Path, file: str, change: Callable[[Any], Any]) -> None:
    """Change a file, and the hashes that cover it."""
    content = json.dumps(change(json.loads((path / file).read_text()))).encode()
    (path / file).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    if file != "manifest.json":
        sha256 = hashlib.sha256(content).hexdigest()
        manifest["files"][file] = {"size": len(content), "sha256": sha256}
        (path / "manifest.json").write_text(json.dumps(manifest))
    marker = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    (path / "COMMITTED").write_text(marker)


@pytest.mark.parametrize(
    "state",
    [
        [],
        None,
        7,
        {"step": "5"},
        {"step": True},
        {"step": 5, "fixed": []},
        {"step": 5, "unknown": None},
        {"step": 5, "__class__": {}},
    ],
)
def test_a_forged_state_is_rejected(tmp_path: Path, state: Any) -> None:
    path = save(tmp_path, 5)
    forge(path, "state.json", lambda _: state)
    with pytest.raises((ConfigError, CorruptCheckpointError), match=r"step_00000005.*state.json"):
        load_weighted_checkpoint(path, 1.0, lambda _: None)


def test_a_state_that_is_nested_too_deeply_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    forge(path, "state.json", lambda state: state)
    content = b'{"data":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (path / "state.json").write_bytes(content)
    forge(path, "manifest.json", lambda _: manifest)
    with pytest.raises(CorruptCheckpointError, match="is not JSON"):
        load_weighted_checkpoint(path, 1.0, lambda _: None)


def test_unsupported_dtypes_are_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, 5, torch.int8)
    with pytest.raises(ConfigError, match=r"'weights/embedding' in 'I8', not a dtype of weights"):
        load_weighted_checkpoint(path, 1.0, lambda _: None)


def test_a_manifest_that_names_other_tensors_than_the_file_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, 5)

    def change(manifest: Any) -> Any:
        manifest["tensors"]["weights/other"] = manifest["tensors"].pop("weights/norm")
        return manifest

    forge(path, "manifest.json", change)
    with pytest.raises(CorruptCheckpointError, match="weights/other"):
        parts([path])
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("call", range(4))
def test_a_full_disk_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    given = parts([save(tmp_path, step) for step in (5, 10)])
    real, calls = builtins.open, iter(range(100))

    def full(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if "x" in mode and next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *rest, **named)

    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(OSError, match="No space left"):
        write_average(tmp_path / "averages/out", given, None, lambda _: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]


def test_an_interrupt_leaves_only_existing_files(tmp_path: Path) -> None:
    given = parts([save(tmp_path, step) for step in (5, 10)])

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "averages/older").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        write_average(tmp_path / "averages/out", given, None, interrupt)
    assert [entry.name for entry in (tmp_path / "averages").iterdir()] == ["older"]


def test_an_existing_directory_is_never_overwritten(tmp_path: Path) -> None:
    given = parts([save(tmp_path, step) for step in (5, 10)])
    (tmp_path / "out").mkdir()
    with pytest.raises(
        ConfigError, match="out exists already; specify a new directory, or remove it"
    ):
        write_average(tmp_path / "out", given, None, lambda _: None)


_MEASURED = """
import sys
from pathlib import Path
from hlat.checkpoint import averaging

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def run(folder, name):
    paths = averaging.select_checkpoints(folder / name, None, 3)
    parts = [averaging.load_weighted_checkpoint(path, 1.0, lambda _: None) for path in paths]
    averaging.write_average(folder / f"{name}_out", parts, None, lambda _: None)

folder = Path(sys.argv[1])
run(folder, "small")
before = peak()
run(folder, "big")
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's peak of memory")
def test_peak_memory_is_below_twice_the_largest_tensor(tmp_path: Path) -> None:
    """Average three checkpoints with one large tensor.

    Read the peak from /proc: getrusage's is inherited from a parent with a higher peak.
    """
    for run, rows in (("small", 64), ("big", 48 * 1024)):
        for step in (1, 2, 3):
            save(tmp_path / run, step, shapes={"big": (rows, 256), "norm": (256,)}, rows=10**9)
    largest = 48 * 1024 * 256 * 4
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 2 * largest
