"""Where a run's checkpoints are: by path, by URL, or as a file in its folder tells."""

import sys
import uuid
from pathlib import Path

import pytest

from hlat.checkpoint import places
from hlat.config.errors import ConfigError


def refusal(location: str, key: str | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        places.at(location, key)
    return str(refused.value)


def test_paths_are_paths() -> None:
    assert places.at("a/b") == Path("a/b")
    assert places.at("~/x") == Path.home() / "x"


def test_urls_that_nothing_can_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("nowhere://x", "checkpoint.start_from").startswith(
        "checkpoint.start_from=nowhere://x cannot be used (ValueError: Protocol not known: nowhere"
    )
    monkeypatch.setitem(sys.modules, "s3fs", None)
    told = refusal("s3://bucket/x", "checkpoint.destination")
    assert told.startswith("checkpoint.destination=s3://bucket/x needs a package that is not")
    assert "s3fs" in told


def test_a_password_is_refused_and_not_repeated() -> None:
    for key in ("checkpoint.destination", None):
        told = refusal("ftp://me:hunter2@host/x", key)
        assert told.startswith(key or "the URL")
        assert "hunter2" not in told


def test_the_place_of_a_run() -> None:
    run = Path("runs/x")
    assert places.home(run, None) == run
    assert places.home(run, "/fast") == Path("/fast/x")
    assert str(places.home(run, "memory://fast/")) == "memory://fast/x"


def test_the_run_tells_where_its_checkpoints_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    assert places.recorded(run) == run
    for there in (places.at("memory://bucket/run"), places.at("/fast/run")):
        places.record(run, there)
        assert places.recorded(run) == there
    places.record(run, Path("fast/run"))
    assert places.recorded(run) == tmp_path / "fast/run"
    places.record(run, run)
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("location", ["memory", "file", "disk"])
def test_trying_a_place_out_leaves_nothing(tmp_path: Path, location: str) -> None:
    urls = {"memory": f"memory://{uuid.uuid4()}", "file": f"file://{tmp_path}", "disk": tmp_path}
    folder = places.at(f"{urls[location]}/a/b")
    for _ in range(2):
        places.try_out(folder)
        assert list(folder.iterdir()) == []


def test_a_place_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for location in (f"{tmp_path}/file", f"file://{tmp_path}/file", "file:///proc/x"):
        with pytest.raises(OSError, match=location.removeprefix("file://")):
            places.try_out(places.at(location))
