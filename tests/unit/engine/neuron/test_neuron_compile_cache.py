"""Compiled modules are merged completely or not at all, under concurrent writes and kills."""

import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from hlat.config.config_errors import ConfigError
from hlat.engine.neuron import neuron_compile_cache

VERSION = "neuronxcc-2.21.18209.0+043b1bf7"
MERGE = (
    "import sys; from pathlib import Path; "
    "from hlat.engine.neuron import neuron_compile_cache as c; "
    "*sources, target = map(Path, sys.argv[1:]); print('ready', flush=True); "
    "sys.stdin.read(); c.merge_caches(sources, target)"
)


def module(cache: Path, number: int, done: bool = True, size: int = 1000) -> Path:
    """Write a module as libneuronxla does."""
    folder = cache / VERSION / f"MODULE_{number}+e30acd3a"
    folder.mkdir(parents=True)
    (folder / "model.hlo_module.pb").write_bytes(b"graph")
    (folder / "compile_flags.json").write_text('["--target=trn1"]')
    if done:
        (folder / "model.neff").write_bytes(bytes([number % 256]) * size)
        (folder / "model.done").touch()
    return folder


def locked(folder: Path) -> Path:
    (folder / "model.hlo_module.pb.lock").touch()
    return folder


def name(number: int) -> str:
    return f"{VERSION}/MODULE_{number}+e30acd3a"


def names(cache: Path) -> list[str]:
    return [
        neuron_compile_cache.get_module_name(path)
        for path in neuron_compile_cache.list_modules(cache)
    ]


def start_process(code: str, *overrides: str | Path) -> "subprocess.Popen[bytes]":
    """Start a process that has printed a line; some wait until their stdin is closed."""
    command = [sys.executable, "-c", code, *map(str, overrides)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process.stdout:
        process.stdout.readline()
    return process


def assert_complete(target: Path) -> None:
    """Check that there are only complete modules with the right bytes, and no temporary files."""
    assert not [path for path in target.glob(".merging/*") if path.is_dir()]
    for path in neuron_compile_cache.list_modules(target):
        number = int(path.name.split("_")[1].split("+")[0])
        neff = (path / "model.neff").read_bytes()
        assert (path / "model.done").exists()
        assert set(neff) == {number % 256}
        assert not [*path.glob("*.lock")]


def test_modules_of_all_nodes_are_merged(tmp_path: Path) -> None:
    for number in (1, 2):
        module(tmp_path / "a", number)
    for number in (2, 3):
        module(tmp_path / "b", number)
    sources, target = [tmp_path / "a", tmp_path / "b"], tmp_path / "all/of/them"
    copied: list[int] = []
    expected = neuron_compile_cache.compute_merge_bytes(sources, target)
    merged = neuron_compile_cache.merge_caches(sources, target, copied.append)
    assert merged.added == names(target) == [name(1), name(2), name(3)]
    assert (merged.present, merged.incomplete) == ([], {})
    assert sum(copied) == expected > 3000
    assert_complete(target)


def test_merging_again_copies_nothing(tmp_path: Path) -> None:
    module(tmp_path / "a", 1)
    neuron_compile_cache.merge_caches([tmp_path / "a"], tmp_path / "all")
    before = (tmp_path / "all" / name(1)).stat().st_ino
    merged = neuron_compile_cache.merge_caches([tmp_path / "a"], tmp_path / "all")
    assert merged.present == [name(1)]
    assert not merged.added
    assert neuron_compile_cache.compute_merge_bytes([tmp_path / "a"], tmp_path / "all") == 0
    assert (tmp_path / "all" / name(1)).stat().st_ino == before


def test_locks_are_not_copied(tmp_path: Path) -> None:
    locked(module(tmp_path / "a", 1))
    assert neuron_compile_cache.merge_caches([tmp_path / "a"], tmp_path / "all").added == [name(1)]
    assert_complete(tmp_path / "all")


def test_an_incomplete_module_is_replaced(tmp_path: Path) -> None:
    module(tmp_path / "a", 1)
    half = locked(module(tmp_path / "all", 1))
    (half / "model.done").unlink()
    assert neuron_compile_cache.merge_caches([tmp_path / "a"], tmp_path / "all").added == [name(1)]
    assert_complete(tmp_path / "all")


def test_a_failed_module_is_copied_from_another_node(tmp_path: Path) -> None:
    (module(tmp_path / "a", 1, done=False) / "model.log").write_text("Failed compilation\n")
    module(tmp_path / "b", 1)
    merged = neuron_compile_cache.merge_caches([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert (merged.added, merged.incomplete) == ([name(1)], {})


def test_modules_that_are_complete_nowhere_are_reported(tmp_path: Path) -> None:
    (module(tmp_path / "a", 1, done=False) / "model.log").write_text("one\ntwo\n")
    (module(tmp_path / "a", 2) / "model.neff").write_bytes(b"")
    (module(tmp_path / "a", 3) / "model.done").unlink()
    module(tmp_path / "a", 4, done=False)
    locked(module(tmp_path / "a", 5, done=False))
    result = {
        name(1): "failed to compile:\n    one\n    two",
        name(2): "has an empty model.neff",
        name(3): "has no model.done",
        name(4): "was never compiled",
        name(5): "has the lock of a compiler that was killed",
    }
    begun = time.monotonic()
    assert (
        neuron_compile_cache.merge_caches([tmp_path / "a"], tmp_path / "all", wait_s=60).incomplete
        == result
    )
    assert time.monotonic() - begun < 10  # no process has that lock
    assert neuron_compile_cache.find_incomplete_modules(tmp_path / "a") == result
    assert names(tmp_path / "all") == []


@pytest.mark.slow
def test_merge_waits_for_a_module_in_compilation(tmp_path: Path) -> None:
    folder = locked(module(tmp_path / "a", 1, done=False))
    with (folder / "model.hlo_module.pb.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            time.sleep(0.7)
            (folder / "model.neff").write_bytes(b"\1")
            (folder / "model.done").touch()

        compiler = threading.Thread(target=finish)
        compiler.start()
        assert neuron_compile_cache.merge_caches([tmp_path / "a"], tmp_path / "all").added == [
            name(1)
        ]
        compiler.join()
    assert_complete(tmp_path / "all")


@pytest.mark.parametrize("where", ["source", "target"])
def test_wait_times_out(tmp_path: Path, where: str) -> None:
    module(tmp_path / "source", 1, done=where == "target")
    if where == "target":
        module(tmp_path / "target", 1, done=False)
    folder = locked(tmp_path / where / name(1))
    with (folder / "model.hlo_module.pb.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = neuron_compile_cache.merge_caches(
            [tmp_path / "source"], tmp_path / "target", wait_s=0.6
        )
    assert merged.incomplete == {name(1): "is being compiled, also after 0.6 s"}
    assert not merged.added


def test_a_compiler_is_detected_by_its_command_line(tmp_path: Path) -> None:
    folder = locked(module(tmp_path, 1, done=False))
    code = "import time; print('ready', flush=True); time.sleep(60)"
    compiler = start_process(code, f"/tmp/x/model.{folder.name}.hlo_module.pb")
    try:
        assert neuron_compile_cache.find_incomplete_modules(tmp_path) == {
            name(1): "is being compiled"
        }
        assert neuron_compile_cache.remove_incomplete_modules(tmp_path) == []
    finally:
        compiler.stdin.close()
        compiler.kill()
        compiler.wait()
    assert not neuron_compile_cache.is_module_compiling(folder)
    assert neuron_compile_cache.remove_incomplete_modules(tmp_path) == [name(1)]
    assert names(tmp_path) == []


def test_complete_modules_are_not_removed(tmp_path: Path) -> None:
    locked(module(tmp_path, 1))
    (module(tmp_path, 2, done=False) / "model.log").write_text("Failed compilation\n")
    assert neuron_compile_cache.remove_incomplete_modules(tmp_path) == [name(2)]
    assert names(tmp_path) == [name(1)]


def test_a_module_that_another_process_replaces_is_not_compiling(tmp_path: Path) -> None:
    folder = module(tmp_path, 1, done=False)

    def scan(path):
        folder.rename(tmp_path / "replaced")
        return os_scandir(path)

    os_scandir = os.scandir
    with mock.patch("os.scandir", scan):
        assert not neuron_compile_cache.is_module_compiling(folder)
    assert not folder.exists()


@pytest.mark.parametrize("num_processes", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_merge_at_the_same_time(tmp_path: Path, num_processes: int) -> None:
    """Merge separate and common modules, of which half are incomplete in the target."""
    target = tmp_path / "all"
    for node in range(num_processes):
        for number in (*range(20), 100 + node):
            module(tmp_path / f"node_{node}", number, size=50_000)
    for number in range(0, 20, 2):
        module(target, number, done=False)
    broken = set(names(target))
    sources = [tmp_path / f"node_{node}" for node in range(num_processes)]
    processes = [start_process(MERGE, source, target) for source in sources]
    for process in processes:
        process.stdin.close()
    while any(process.poll() is None for process in processes):
        for path in neuron_compile_cache.list_modules(target):
            assert (
                neuron_compile_cache.is_module_complete(path)
                or neuron_compile_cache.get_module_name(path) in broken
            )
    assert [process.wait() for process in processes] == [0] * num_processes
    assert len(names(target)) == 20 + num_processes
    assert_complete(target)


@pytest.mark.slow
def test_a_killed_merge_leaves_no_half_module(tmp_path: Path) -> None:
    source, target, moments = tmp_path / "a", tmp_path / "all", random.Random(7)
    for number in range(60):
        module(source, number, size=400_000)
    for number in range(0, 60, 3):
        module(target, number, done=False)
    broken, counts = set(names(target)), set()
    for _ in range(15):
        process = start_process(MERGE, source, target)
        process.stdin.close()
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        process.wait()
        full = [
            path
            for path in neuron_compile_cache.list_modules(target)
            if neuron_compile_cache.is_module_complete(path)
        ]
        rest = {
            neuron_compile_cache.get_module_name(path)
            for path in neuron_compile_cache.list_modules(target)
        }
        assert rest - {neuron_compile_cache.get_module_name(path) for path in full} <= broken
        counts.add(len(full))
    neuron_compile_cache.merge_caches([source], target)
    assert len(counts) > 1, "no kill came while it copied"
    assert len(names(target)) == 60
    assert_complete(target)


@pytest.mark.slow
def test_modules_that_another_process_completes_are_not_replaced(tmp_path: Path) -> None:
    module(tmp_path / "a", 1)
    target, results = tmp_path / "all", []
    (target / ".merging").mkdir(parents=True)
    merge = threading.Thread(
        target=lambda: results.append(neuron_compile_cache.merge_caches([tmp_path / "a"], target))
    )
    with (target / ".merging/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merge.start()
        merge.join(timeout=1)
        assert [*target.glob(".merging/*/MODULE_*/model.done")], "no copy waits for its turn"
        hf_config = module(target, 1).stat().st_ino
    merge.join()
    assert (results[0].added, results[0].present) == ([], [name(1)])
    assert (target / name(1)).stat().st_ino == hf_config
    assert_complete(target)


def test_cache_dir(tmp_path: Path) -> None:
    where, variable = neuron_compile_cache.get_cache_dir, "NEURON_COMPILE_CACHE_URL"
    assert where({}) == Path("/var/tmp/neuron-compile-cache")
    assert where({variable: f"{tmp_path}/x"}) == tmp_path / "x"
    assert where({variable: f"file://{tmp_path}"}) == tmp_path
    for wrong in ("s3://bucket/cache", "cache"):
        with pytest.raises(ConfigError, match=f"{variable}={wrong} is not an absolute path"):
            where({variable: wrong})
    with pytest.raises(ConfigError, match="NEURON_CC_FLAGS has --cache_dir"):
        where({"NEURON_CC_FLAGS": "-O1 --cache_dir=/x"})
