"""Contract of checkpoint stores: nothing committed is ever lost or silently wrong.

Every test runs twice: on a local directory, and by its URL as a store without rename and flush.
"""

import builtins
import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from hlat.checkpoint import checkpoint_store, retention
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_store import (
    load_checkpoint,
    load_state_json,
    save_checkpoint,
    verify_checkpoint,
)
from hlat.checkpoint.retention import prune_checkpoints
from hlat.config.config_errors import ConfigError
from hlat.distributed.state_shard import StateShard
from hlat.storage import durable_files, storage_path
from tests.support.newest_checkpoint import find_newest_valid

State = dict[str, torch.Tensor]
ELSEWHERE = "file://"

FILES = ["rank_00000.safetensors", "state.json", "manifest.json", "COMMITTED"]


@pytest.fixture(autouse=True, params=["disk", "elsewhere"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if the functions under test are wrapped to get and return URLs."""
    if request.param == "elsewhere":
        for function in (
            save_checkpoint,
            load_checkpoint,
            load_state_json,
            verify_checkpoint,
            find_newest_valid,
            prune_checkpoints,
        ):
            monkeypatch.setitem(globals(), function.__name__, by_url(function))
    return bool(request.param == "elsewhere")


def by_url(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Path, *arguments: Any, **options: Any) -> Any:
        urls = {
            name: storage_path.parse_storage_path(f"{ELSEWHERE}{value}")
            if isinstance(value, Path)
            else value
            for name, value in options.items()
        }
        return as_path(
            function(storage_path.parse_storage_path(f"{ELSEWHERE}{path}"), *arguments, **urls)
        )

    return called


def as_path(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(as_path, value))
    url = str(value)
    return Path(url.removeprefix(ELSEWHERE)) if url.startswith(ELSEWHERE) else value


on_disk = pytest.mark.parametrize("elsewhere", ["disk"], indirect=True)


def build_full_shard(name: str, tensor: torch.Tensor) -> StateShard:
    shape = tuple(tensor.shape)
    return StateShard(name, shape, (0,) * len(shape), shape, tensor)


def split_shards(name: str, tensor: torch.Tensor, *boxes: tuple[slice, ...]) -> list[StateShard]:
    shards = []
    for box in boxes:
        part = tensor[box]
        offset = tuple(index.start for index in box)
        shards.append(StateShard(name, tuple(tensor.shape), offset, tuple(part.shape), part))
    return shards


def make_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 8, generator=generator)
    return {
        "weights/matrix": base,
        "weights/transposed": torch.randn(5, 3, generator=generator).t(),
        "weights/strided": torch.randn(4, 10, generator=generator)[:, ::2],
        "weights/bf16": torch.randn(7, generator=generator).bfloat16(),
        "exp_avg/odd": torch.arange(3, dtype=torch.uint8) + seed,
        "count/scalar": torch.tensor(float(seed)),
        "count/integer": torch.tensor(2**40 + seed),
        "flags": torch.tensor([True, False, seed % 2 == 0]),
        "empty": torch.zeros(0, 4),
    }


def save_state(folder: Path, step: int) -> Path:
    shards = [build_full_shard(name, tensor) for name, tensor in make_state(step).items()]
    return save_checkpoint(folder, step, shards, {"step": step, "data": {"cursors": [step, 2]}})


def assert_contains(path: Path, step: int) -> None:
    expected = make_state(step)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_checkpoint(path, [build_full_shard(name, tensor) for name, tensor in found.items()])
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert load_state_json(path) == {"step": step, "data": {"cursors": [step, 2]}}


def temporary_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".tmp-")]


def test_state_is_restored_bit_exactly(tmp_path: Path) -> None:
    path = save_state(tmp_path / "checkpoints", 1000)
    assert path == tmp_path / "checkpoints" / "step_00001000"
    verify_checkpoint(path)
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES)
    assert_contains(path, 1000)
    assert find_newest_valid(tmp_path / "checkpoints") == (path, [])


def test_special_values_are_restored_bit_exactly(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1], dtype=torch.int32)
    path = save_checkpoint(
        tmp_path, 1, [build_full_shard("weights/special", bits.view(torch.float32))], {}
    )
    found = torch.zeros(4)
    load_checkpoint(path, [build_full_shard("weights/special", found)])
    assert torch.equal(found.view(torch.int32), bits)


def test_saving_what_was_restored_gives_the_same_bytes(tmp_path: Path) -> None:
    first = save_state(tmp_path / "first", 3)
    found = {name: torch.zeros_like(tensor) for name, tensor in make_state(3).items()}
    shards = [build_full_shard(name, tensor) for name, tensor in found.items()]
    load_checkpoint(first, shards)
    second = save_checkpoint(tmp_path / "second", 3, shards, load_state_json(first))
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_restore_fills_a_view_of_another_shape_and_strides(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(4, 6)
    path = save_checkpoint(tmp_path, 1, [build_full_shard("weights/w", values)], {})
    memory = torch.zeros(2, 2, 6, 2)
    view = memory[..., 0]
    load_checkpoint(path, [StateShard("weights/w", (4, 6), (0, 0), (4, 6), view)])
    assert torch.equal(view.reshape(4, 6), values)
    assert torch.count_nonzero(memory[..., 1]) == 0


def test_restore_converts_to_the_dtype_of_the_chunk(tmp_path: Path) -> None:
    values = torch.randn(5, generator=torch.Generator().manual_seed(0))
    path = save_checkpoint(tmp_path, 1, [build_full_shard("weights/w", values)], {})
    found = torch.zeros(5, dtype=torch.bfloat16)
    load_checkpoint(path, [build_full_shard("weights/w", found)])
    assert torch.equal(found, values.bfloat16())


def test_restore_fills_parameters_that_need_gradients(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, [build_full_shard("weights/w", torch.ones(3))], {})
    parameter = torch.nn.Parameter(torch.zeros(3))
    load_checkpoint(path, [build_full_shard("weights/w", parameter)])
    assert parameter.tolist() == [1, 1, 1]


ROWS = [(slice(0, 5), slice(0, 7)), (slice(5, 6), slice(0, 7)), (slice(6, 9), slice(0, 7))]
COLUMNS = [(slice(0, 9), slice(0, 2)), (slice(0, 9), slice(2, 7))]
TILES = [
    (rows, columns)
    for rows in (slice(0, 4), slice(4, 9))
    for columns in (slice(0, 3), slice(3, 4), slice(4, 7))
]
LAYOUTS = {"whole": [(slice(0, 9), slice(0, 7))], "rows": ROWS, "columns": COLUMNS, "tiles": TILES}


@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_a_matrix_restores_under_any_other_slicing(tmp_path: Path, saved: str, loaded: str) -> None:
    values = torch.arange(63.0).reshape(9, 7)
    path = save_checkpoint(tmp_path, 1, split_shards("weights/w", values, *LAYOUTS[saved]), {})
    found = torch.full((9, 7), -1.0)
    load_checkpoint(path, split_shards("weights/w", found, *LAYOUTS[loaded]))
    assert torch.equal(found, values)


def test_a_single_slice_restores_alone(tmp_path: Path) -> None:
    values = torch.arange(63.0).reshape(9, 7)
    path = save_checkpoint(tmp_path, 1, split_shards("weights/w", values, *ROWS), {})
    part = torch.zeros(3, 2)
    load_checkpoint(path, [StateShard("weights/w", (9, 7), (4, 5), (3, 2), part)])
    assert torch.equal(part, values[4:7, 5:7])


def test_restore_names_everything_that_does_not_fit_and_fills_nothing(tmp_path: Path) -> None:
    path = save_checkpoint(
        tmp_path,
        1,
        [build_full_shard("weights/a", torch.ones(2)), build_full_shard("b", torch.ones(2, 3))],
        {},
    )
    found = torch.zeros(2)
    shards = [
        build_full_shard("weights/a", found),
        build_full_shard("b", torch.zeros(3, 2)),
        build_full_shard("weights/c", torch.zeros(4)),
    ]
    with pytest.raises(ConfigError) as error:
        load_checkpoint(path, shards)
    first, second = error.value.problems
    assert "has b with shape (2, 3), this run with (3, 2)" in first
    assert "has no tensor weights/c; this run needs it with shape (4,)" in second
    assert found.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (split_shards("w", torch.zeros(9, 7), *ROWS[:2]), "do not cover"),
        (split_shards("w", torch.zeros(9, 7), *ROWS, ROWS[1]), "do not cover"),
        (
            [
                *split_shards("w", torch.zeros(4), (slice(0, 2),)),
                *split_shards("w", torch.zeros(4).int(), (slice(2, 4),)),
            ],
            "F32 and of shape",
        ),
        ([build_full_shard("w", torch.zeros(2, dtype=torch.complex64))], "complex64"),
        ([StateShard("w", (4,), (0,), (4,), torch.zeros(3))], "3 elements"),
    ],
    ids=["gap", "overlap", "dtypes", "complex", "count"],
)
def test_save_rejects_chunks_that_form_no_state(
    tmp_path: Path, shards: list[StateShard], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, 1, shards, {})
    assert list(tmp_path.iterdir()) == []


def stamp(file: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written, but not when it is read."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def test_a_committed_checkpoint_is_never_rewritten(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, [build_full_shard("w", torch.ones(2))], {})
    before = {entry.name: stamp(entry) for entry in path.iterdir()}
    assert save_checkpoint(tmp_path, 1, [build_full_shard("w", torch.zeros(2))], {}) == path
    assert {entry.name: stamp(entry) for entry in path.iterdir()} == before


def test_a_damaged_checkpoint_is_renamed_when_its_step_is_saved_again(tmp_path: Path) -> None:
    for _ in range(2):
        path = save_state(tmp_path, 1)
        (path / "state.json").write_text("{}")
    save_state(tmp_path, 1)
    assert_contains(path, 1)
    assert find_newest_valid(tmp_path) == (path, [])
    for number in (1, 2):
        assert (tmp_path / f"step_00000001_damaged_{number}" / "state.json").read_text() == "{}"


class Killed(BaseException):
    """Simulated SIGKILL, which no code may catch."""


class Faults:
    """Failure of the n-th disk operation; half of a failing write is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException) -> None:
        self.calls = 0
        self._failing, self._error = failing, error
        for owner, name in [(os, "fsync"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")]:
            monkeypatch.setattr(owner, name, self._guarded(getattr(owner, name)))
        monkeypatch.setattr(durable_files, "open", self._open, raising=False)
        for name in ("cp_file", "rm_file"):
            function = self._guarded(getattr(LocalFileSystem, name))
            monkeypatch.setattr(LocalFileSystem, name, function)
        self._rm, self._upload = LocalFileSystem.rm, LocalFileSystem._open
        monkeypatch.setattr(LocalFileSystem, "rm", lambda *a, **o: self._remove(*a, **o))
        monkeypatch.setattr(LocalFileSystem, "_open", lambda *a, **o: self._create(*a, **o))

    def check(self) -> None:
        self.calls += 1
        dead = isinstance(self._error, Killed) and self.calls > self._failing
        if dead or self.calls == self._failing:
            raise self._error

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.check()
            return function(*arguments, **options)

        return guarded

    def _open(self, path: Path, mode: str) -> Any:
        if "x" not in mode:
            return builtins.open(path, mode)
        self.check()
        return Torn(builtins.open(path, mode, buffering=0), self)

    def _create(self, filesystem: Any, path: str, mode: str, **options: Any) -> Any:
        """Create a file that exists before it is complete, as in a non-atomic object store."""
        if "w" not in mode:
            return self._upload(filesystem, path, mode, **options)
        self.check()
        return Torn(self._upload(filesystem, path, mode, **options), self)

    def _remove(self, filesystem: Any, path: str, recursive: bool) -> None:
        """Remove in several requests, so that some files exist after a failure."""
        names = os.listdir(path) if os.path.isdir(path) else []
        for name in names[: len(names) // 2]:
            os.unlink(os.path.join(path, name))
        self.check()
        if os.path.exists(path):
            self._rm(filesystem, path, recursive)


class Torn:
    """File with faults in its writes."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __enter__(self) -> "Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, part: "bytes | memoryview") -> None:
        self._file.write(part[: len(part) // 2])
        self._faults.check()
        self._file.write(part[len(part) // 2 :])


def iterate_failures(
    run: Callable[[Path], object], start: Path, error: BaseException
) -> Iterator[Path]:
    """Run on copies of a directory; fail at the first, second, ... operation, until none fails."""
    for failing in range(1, 1000):
        folder = start.with_name(f"{start.name}_{failing}")
        shutil.copytree(start, folder)
        with pytest.MonkeyPatch.context() as monkeypatch:
            faults = Faults(monkeypatch, failing, error)
            with suppress(type(error)):
                run(folder)
        yield folder
        if faults.calls < failing:
            assert failing > 5
            return


def test_a_kill_at_any_step_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    start = tmp_path / "checkpoints"
    save_state(start, 1)
    newest = []
    for folder in iterate_failures(lambda folder: save_state(folder, 2), start, Killed()):
        path, refused = find_newest_valid(folder)
        assert path is not None
        assert refused == []
        newest.append(int(path.name[-1]))
        assert_contains(path, newest[-1])
        save_state(folder, 3)
        prune_checkpoints(folder, 9)
        assert temporary_folders(folder) == []
        assert_contains(folder / "step_00000001", 1)
        assert_contains(folder / "step_00000003", 3)
    assert newest == sorted(newest)
    assert newest[0] == 1
    assert newest[-1] == 2


def test_a_kill_while_a_damaged_step_is_saved_again_keeps_the_older_one(tmp_path: Path) -> None:
    start = tmp_path / "checkpoints"
    save_state(start, 1)
    (save_state(start, 2) / "COMMITTED").unlink()
    for folder in iterate_failures(lambda folder: save_state(folder, 2), start, Killed()):
        path, _ = find_newest_valid(folder)
        assert path is not None
        newest = int(path.name[-1])
        assert_contains(path, newest)
    assert newest == 2


def test_a_disk_error_at_any_step_of_a_save_leaves_nothing_behind(tmp_path: Path) -> None:
    start = tmp_path / "checkpoints"
    save_state(start, 1)
    error = OSError(errno.ENOSPC, "No space left on device")
    for folder in iterate_failures(lambda folder: save_state(folder, 2), start, error):
        assert temporary_folders(folder) == []
        assert_contains(folder / "step_00000001", 1)
        path, refused = find_newest_valid(folder)
        assert path is not None
        assert refused == []


def test_a_kill_at_any_step_of_a_prune_leaves_only_complete_checkpoints(
    tmp_path: Path, elsewhere: bool
) -> None:
    start = tmp_path / "checkpoints"
    for step in range(1, 7):
        save_state(start, step)
    (start / ".tmp-step_00000007-1").mkdir()
    for folder in iterate_failures(lambda folder: prune_checkpoints(folder, 2), start, Killed()):
        for path in folder.glob("step_*"):
            if not elsewhere or (path / "COMMITTED").exists():
                verify_checkpoint(path)
        assert find_newest_valid(folder) == (folder / "step_00000006", [])


@on_disk
def test_everything_is_flushed_before_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path, 1)
    steps: list[str] = []
    replace = os.replace

    def record_rename(source: Path, target: Path) -> None:
        steps.append(f"rename to {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda number: steps.append(flushed_name(number)))
    monkeypatch.setattr(os, "replace", record_rename)
    save_state(tmp_path, 2)
    temporary = f".tmp-step_00000002-{os.getpid()}"
    assert steps == [*FILES, temporary, "rename to step_00000002", tmp_path.name]


def flushed_name(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


def test_a_real_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_checkpoint(tmp_path, 2, [build_full_shard("w", torch.zeros(50_000))], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert temporary_folders(tmp_path) == []
    assert find_newest_valid(tmp_path) == (tmp_path / "step_00000001", [])


def flip_bit(path: Path, random_: random.Random) -> None:
    content = bytearray(path.read_bytes())
    position = random_.randrange(len(content) * 8)
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)


def truncate(path: Path, random_: random.Random) -> None:
    os.truncate(path, random_.randrange(path.stat().st_size))


def zero_page(path: Path, random_: random.Random) -> None:
    content = path.read_bytes()
    begin = random_.randrange(len(content))
    path.write_bytes(content[:begin] + b"\0" * len(content[begin:]))


def append(path: Path, random_: random.Random) -> None:
    with path.open("ab") as file:
        file.write(random_.randbytes(random_.randrange(1, 64)))


def delete(path: Path, random_: random.Random) -> None:
    path.unlink()


def replace_by_older(path: Path, random_: random.Random) -> None:
    shutil.copy(path.parent.with_name("step_00000001") / path.name, path)


def replace_by_link(path: Path, random_: random.Random) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def replace_by_folder(path: Path, random_: random.Random) -> None:
    path.unlink()
    path.mkdir()


TRIALS: dict[Callable[[Path, random.Random], None], int] = {
    flip_bit: 60,
    truncate: 20,
    zero_page: 10,
    append: 5,
    delete: 1,
    replace_by_older: 1,
    replace_by_link: 1,
    replace_by_folder: 1,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", TRIALS)
def test_damage_to_any_file_is_detected_and_the_previous_checkpoint_used(
    tmp_path: Path, elsewhere: bool, damage: Callable[[Path, random.Random], None], name: str
) -> None:
    random_ = random.Random(f"{damage.__name__} {name}")
    save_state(tmp_path, 1)
    good = save_state(tmp_path, 2)
    original = tmp_path / "kept"
    good.rename(original)
    for _ in range(TRIALS[damage]):
        shutil.copytree(original, good)
        damage(good / name, random_)
        with pytest.raises(CorruptCheckpointError, match="step_00000002"):
            verify_checkpoint(good)
        path, refused = find_newest_valid(tmp_path)
        assert path == tmp_path / "step_00000001"
        if elsewhere and name == "COMMITTED" and damage in (truncate, delete):
            assert refused == [], "a save that was not completed is nothing to complain of"
        else:
            assert len(refused) == 1
            assert "step_00000002 is rejected" in refused[0]
        assert good.exists()
        shutil.rmtree(good)
    assert_contains(tmp_path / "step_00000001", 1)


def test_an_extra_file_is_flagged(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)
    (path / "rank_00001.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"rank_00001\.safetensors is not listed"):
        verify_checkpoint(path)


def test_a_checkpoint_under_the_name_of_another_step_is_rejected(tmp_path: Path) -> None:
    save_state(tmp_path, 1).rename(tmp_path / "step_00000002")
    assert find_newest_valid(tmp_path)[0] is None


def test_a_checkpoint_may_be_copied_under_a_name_that_is_no_step(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1).rename(tmp_path / "start_of_the_ablation")
    verify_checkpoint(path)
    assert_contains(path, 1)


def test_a_folder_without_marker_is_ignored(tmp_path: Path, elsewhere: bool) -> None:
    path = save_state(tmp_path, 1)
    (path / "COMMITTED").unlink()
    found, refused = find_newest_valid(tmp_path)
    assert found is None
    assert len(refused) == (0 if elsewhere else 1)
    assert all("COMMITTED cannot be read" in sentence for sentence in refused)
    for read in (verify_checkpoint, load_state_json, lambda path: load_checkpoint(path, [])):
        with pytest.raises(CorruptCheckpointError, match="COMMITTED"):
            read(path)


def test_load_detects_damage_of_the_files_that_it_reads(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)
    (path / "state.json").write_text('{"step": 2}')
    with pytest.raises(CorruptCheckpointError, match=r"state\.json"):
        load_state_json(path)
    os.truncate(path / "rank_00000.safetensors", 300)
    with pytest.raises(CorruptCheckpointError, match="rank_00000"):
        load_checkpoint(path, [build_full_shard("weights/matrix", torch.zeros(6, 8))])


def test_there_is_no_checkpoint_in_a_missing_or_empty_folder(tmp_path: Path) -> None:
    assert find_newest_valid(tmp_path) == (None, [])
    assert find_newest_valid(tmp_path / "missing") == (None, [])
    prune_checkpoints(tmp_path / "missing", 1)


def test_prune_keeps_the_newest_and_removes_dead_writes(tmp_path: Path, elsewhere: bool) -> None:
    for step in (1, 2, 3, 10, 200_000_000):
        save_state(tmp_path, step)
    dead = tmp_path / ("step_00000009" if elsewhere else ".tmp-step_00000009-77")
    dead.mkdir()
    (dead / "state.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    prune_checkpoints(tmp_path, 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes", "step_00000010", "step_200000000"]


def test_prune_counts_only_valid_checkpoints_and_keeps_damaged_ones(
    tmp_path: Path, elsewhere: bool
) -> None:
    for step in range(1, 7):
        save_state(tmp_path, step)
    flip_bit(tmp_path / "step_00000006" / "rank_00000.safetensors", random.Random(0))
    (tmp_path / "step_00000004" / "COMMITTED").unlink()
    prune_checkpoints(tmp_path, 2)
    names = sorted(path.name[-1] for path in tmp_path.iterdir())
    assert names == (["3", "5", "6"] if elsewhere else ["3", "4", "5", "6"])
    prune_checkpoints(tmp_path, 0)
    assert find_newest_valid(tmp_path)[0] == tmp_path / "step_00000005"


def test_prune_removes_nothing_when_no_checkpoint_is_valid(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (save_state(tmp_path, step) / "state.json").write_text("{}")
    prune_checkpoints(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_prune_retains_the_newest_and_every_nth_step_and_returns_removed_paths(
    tmp_path: Path, elsewhere: bool
) -> None:
    for step in range(1, 10):
        save_state(tmp_path, step)
    removed = prune_checkpoints(tmp_path, 2, keep_every_steps=3)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["3", "6", "8", "9"]
    assert [path.name[-1] for path in removed] == ["7", "5", "4", "2", "1"]
    assert prune_checkpoints(tmp_path, 1, keep_every_steps=3) == [tmp_path / "step_00000008"]
    assert prune_checkpoints(tmp_path, 1, keep_every_steps=3) == []
    dead = tmp_path / ("step_00000010" if elsewhere else ".tmp-step_00000010-7")
    dead.mkdir()
    assert prune_checkpoints(tmp_path, 1, keep_every_steps=3) == [dead]
    assert not dead.exists()


def test_prune_reads_no_manifests_of_checkpoints_that_it_retains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long run retains a checkpoint every n steps, and prunes after each save."""
    paths = {step: save_state(tmp_path, step) for step in range(1, 10)}
    read: list[Path] = []
    load_manifest = checkpoint_store.load_manifest
    monkeypatch.setattr(
        retention,
        "load_manifest",
        lambda path, *rest: read.append(as_path(path)) or load_manifest(path, *rest),
    )
    prune_checkpoints(tmp_path, 2, keep_every_steps=3, verified=paths[9])
    assert read == [paths[step] for step in (8, 7, 5, 4, 2, 1)]
    read.clear()
    assert prune_checkpoints(tmp_path, 2, keep_every_steps=3, verified=paths[9]) == []
    assert read == [paths[8]]


def test_prune_does_not_read_again_what_was_just_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [save_state(tmp_path, step) for step in (1, 2, 3)]
    read: list[Path] = []
    monkeypatch.setattr(
        checkpoint_store, "verify_files", lambda path, *_: read.append(as_path(path))
    )
    assert prune_checkpoints(tmp_path, 2, verified=paths[2]) == [paths[0]]
    assert read == []
    prune_checkpoints(tmp_path, 2, verified=paths[1])
    assert read == [paths[2]]


class Payload:
    """Object that creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_hostile_files_run_nothing_and_are_rejected(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    payload = pickle.dumps(Payload(trace))
    path = save_state(tmp_path / "checkpoints", 1)
    for name in FILES:
        (path / name).write_bytes(payload)
    for read in (
        verify_checkpoint,
        load_state_json,
        lambda path: load_checkpoint(path, [build_full_shard("flags", torch.zeros(3))]),
    ):
        with pytest.raises(CorruptCheckpointError):
            read(path)
    assert find_newest_valid(tmp_path / "checkpoints")[0] is None
    assert not trace.exists()


def test_hostile_files_with_matching_hashes_run_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    path = save_checkpoint(tmp_path / "checkpoints", 1, [build_full_shard("w", torch.zeros(3))], {})
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name in manifest["files"]:
        (path / name).unlink()
        record = durable_files.write_file(path / name, [pickle.dumps(Payload(trace))])
        manifest["files"][name] = {"size": record.size, "sha256": record.sha256}
    for name in ("manifest.json", "COMMITTED"):
        (path / name).unlink()
    record = durable_files.write_file(path / "manifest.json", [json.dumps(manifest).encode()])
    durable_files.write_file(path / "COMMITTED", [record.sha256.encode()])
    with pytest.raises(CorruptCheckpointError, match="rank_00000"):
        verify_checkpoint(path)
    with pytest.raises(CorruptCheckpointError):
        load_checkpoint(path, [build_full_shard("w", torch.zeros(3))])
    with pytest.raises(CorruptCheckpointError, match="JSON"):
        load_state_json(path)
    assert not trace.exists()
