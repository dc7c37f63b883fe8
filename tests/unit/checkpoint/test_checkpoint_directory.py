"""Checkpoint roots by path, URL or recorded location, and errors of unusable locations."""

import sys
import uuid
from pathlib import Path

import pytest

from hlat.checkpoint import checkpoint_directory
from hlat.config import redaction
from hlat.config.config_errors import ConfigError
from hlat.storage import storage_path


def find_error(location: str, key: str | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        storage_path.parse_storage_path(location, key)
    return str(refused.value)


def test_paths_are_parsed() -> None:
    assert storage_path.parse_storage_path("a/b") == Path("a/b")
    assert storage_path.parse_storage_path("~/x") == Path.home() / "x"


def test_unsupported_urls_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_error("nowhere://x", "checkpoint.start_from").startswith(
        "checkpoint.start_from: nowhere://x: nowhere is not an allowed protocol; use file, "
    )
    monkeypatch.setenv("HLAT_STORAGE_PROTOCOLS", "elsewhere,nowhere")
    assert find_error("nowhere://x", "checkpoint.start_from").startswith(
        "checkpoint.start_from=nowhere://x cannot be used (ValueError: Protocol not known: nowhere"
    )
    monkeypatch.setitem(sys.modules, "s3fs", None)
    message = find_error("s3://bucket/x", "checkpoint.destination")
    assert message.startswith("checkpoint.destination=s3://bucket/x needs a package that is not")
    assert "s3fs" in message


def test_a_password_is_rejected_and_not_repeated() -> None:
    for key in ("checkpoint.destination", None):
        message = find_error("ftp://me:hunter2@host/x", key)
        assert message.startswith(key or "the URL")
        assert "hunter2" not in message


def test_checkpoint_root_of_a_run() -> None:
    run = Path("runs/x")
    assert checkpoint_directory.build_checkpoint_root(run, None) == run
    assert checkpoint_directory.build_checkpoint_root(run, "/fast") == Path("/fast/x")
    assert (
        str(checkpoint_directory.build_checkpoint_root(run, "memory://fast/")) == "memory://fast/x"
    )


def test_a_run_records_its_checkpoint_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    assert checkpoint_directory.load_checkpoint_root(run) == run
    for there in (
        storage_path.parse_storage_path("memory://bucket/run"),
        storage_path.parse_storage_path("/fast/run"),
    ):
        checkpoint_directory.save_checkpoint_root(run, there)
        assert checkpoint_directory.load_checkpoint_root(run) == there
    checkpoint_directory.save_checkpoint_root(run, Path("fast/run"))
    assert checkpoint_directory.load_checkpoint_root(run) == tmp_path / "fast/run"
    checkpoint_directory.save_checkpoint_root(run, run)
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("location", ["memory", "file", "disk"])
def test_validate_writable_leaves_no_files(tmp_path: Path, location: str) -> None:
    urls = {"memory": f"memory://{uuid.uuid4()}", "file": f"file://{tmp_path}", "disk": tmp_path}
    folder = storage_path.parse_storage_path(f"{urls[location]}/a/b")
    for _ in range(2):
        storage_path.validate_writable(folder)
        assert list(folder.iterdir()) == []


def test_an_unwritable_location_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for location in (f"{tmp_path}/file", f"file://{tmp_path}/file", "file:///proc/x"):
        with pytest.raises(OSError, match=location.removeprefix("file://")):
            storage_path.validate_writable(storage_path.parse_storage_path(location))


def test_a_secret_of_the_environment_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are expanded, but not a URL of a foreign file, which would send a secret to a server."""
    monkeypatch.setenv("A_SECRET", "canary")
    redaction.record_variables(["A_SECRET"])
    run = tmp_path / "canary_runs/x"
    run.mkdir(parents=True)
    file = run / checkpoint_directory.DESTINATION_FILE
    for location in (str(tmp_path / "canary/y"), f"memory://canary-{uuid.uuid4()}"):
        root = checkpoint_directory.build_checkpoint_root(run, location)
        checkpoint_directory.save_checkpoint_root(run, root)
        assert "canary" not in file.read_text()
        assert "canary" not in (root / checkpoint_directory.OWNER_FILE).read_bytes().decode()
        assert checkpoint_directory.load_checkpoint_root(run) == root
        checkpoint_directory.validate_ownership(run, root)
    monkeypatch.setattr(redaction, "_VALUES", redaction.RecordedValues())
    with pytest.raises(ConfigError, match=r"variable of the environment.*directory of the check"):
        checkpoint_directory.load_checkpoint_root(run)
