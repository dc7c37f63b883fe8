"""A job runs the archived version of the program in any working directory."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hlat.config import compose as composition
from hlat.tracking import provenance

composition.register_configs()
from hydra_plugins.hlat_launchers.slurm import _code_archive_main  # noqa: E402 (known from now)
from hydra_plugins.hlat_launchers.slurm._code_archive import CodeArchive  # noqa: E402 (as above)

SHOW = """import json, os, sys, time, hlat
import hlat.config.package_dirs as f, hlat.tracking.provenance as p
from hlat.config.compose import compose_config
tp = compose_config(['parallelism.tp=2']).parallelism.tp
folder = str(f.find_code_snapshot())
assert f.find_package_dir('conf').parent == f.find_code_snapshot()
mode = oct(os.stat(folder).st_mode)[-3:]
print(json.dumps([folder, mode, p.get_git_revision(), tp, p.__cached__]), flush=True)
if len(sys.argv) > 1: time.sleep(60)
"""


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    """Write an archive with a module that shows where it runs, next to a later checkout."""
    monkeypatch.setattr(provenance, "_run_git", lambda *arguments: f"git {arguments[0]}")
    (tmp_path / "hlat").mkdir()
    (tmp_path / "hlat/__init__.py").write_text("raise SystemExit('the checkout, later')")
    path = tmp_path / "code.zip"
    CodeArchive().write(path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("hlat/show.py", SHOW)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return path


def run(archive: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(archive), *arguments]
    return subprocess.run(command, cwd=archive.parent, capture_output=True, text=True)


def test_an_archive_runs_its_modules_and_has_bytecode_and_revision(archive, tmp_path):
    done = run(archive, "hlat.show")
    folder, mode, revision, tp, cached = json.loads(done.stdout)
    assert (mode, revision, tp) == ("700", "git rev-parse", 2), done.stderr
    assert Path(folder).parent == tmp_path / "tmp"
    assert not Path(folder).exists(), "it is removed at the end"
    with zipfile.ZipFile(archive) as file:
        assert Path(cached).relative_to(folder).as_posix() in file.namelist()
    done = run(archive, "hlat.train", "--frozen", "nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("hlat: --frozen nowhere: ")


def test_the_name_of_an_archive_depends_on_its_content(archive):
    one, other = CodeArchive(), CodeArchive()
    assert one.name == other.name
    names = zipfile.ZipFile(archive).namelist()
    assert {"__main__.py", "conf/config.yaml", "hlat/train.py"} <= {*names}
    assert not [name for name in names if name.startswith("launchers")]


@pytest.mark.slow
def test_the_next_process_removes_the_directory_of_a_killed_one(archive, tmp_path):
    command = [sys.executable, str(archive), "hlat.show", "wait"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    folder = Path(json.loads(process.stdout.readline())[0])
    os.utime(folder, (1, 1))
    _code_archive_main.remove_stale_directories(str(tmp_path / "tmp"))
    assert folder.exists(), "its process runs"
    process.kill()
    process.communicate()
    os.utime(folder, None)
    _code_archive_main.remove_stale_directories(str(tmp_path / "tmp"))
    assert folder.exists(), "it may be new"
    os.utime(folder, (1, 1))
    _code_archive_main.remove_stale_directories(str(tmp_path / "tmp"))
    assert not folder.exists()


@pytest.mark.slow
def test_a_full_disk_is_avoided(archive, tmp_path, monkeypatch):
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    free.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(full))
    monkeypatch.setattr(_code_archive_main, "_DISKS", (str(free),))
    extract = zipfile.ZipFile.extractall

    def fail_if_full(file, folder):
        extract(file, folder)
        if Path(folder).parent == full:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", fail_if_full)
    monkeypatch.setattr(_code_archive_main.atexit, "register", lambda *arguments: None)
    folder = Path(_code_archive_main.extract(str(archive)))
    assert folder.parent == free
    assert not [*full.iterdir()]
    shutil.rmtree(folder)
    monkeypatch.setattr(_code_archive_main, "_DISKS", ())
    assert Path(_code_archive_main.extract(str(archive))).parent == tmp_path


@pytest.mark.slow
def test_attempts_of_jobs_run_inside_of_the_archive(archive):
    """Only other modules run from extracted files; the archive has no files that a module reads."""
    done = run(archive, "hlat.jobs.attempt", "nowhere")
    assert (done.returncode, done.stderr) == (1, "hlat: nowhere contains no valid submission\n")
