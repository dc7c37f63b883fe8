"""Copies of finished runs, and the runs among several that are no copies."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data import training_data
from hlat.recovery import run_copy
from hlat.tracking import finished_runs, provenance
from hlat.tracking.jsonl_log import open_events_log
from hlat.tracking.run_directory import build_run_dir

CODE, DATA = "c0de", {"tokenizer": "x"}


@pytest.fixture
def config(compose, small, tmp_path: Path, monkeypatch):
    """Return a function that builds the configuration of a run in an empty root."""
    monkeypatch.setattr(provenance, "compute_code_digest", lambda: CODE)
    data = SimpleNamespace(fingerprint=DATA)
    monkeypatch.setattr(training_data, "open_training_data", lambda *_: data)
    settings = [*small, f"run.root={tmp_path}", "run.steps=2"]
    return lambda name, *more: resolve_config(compose(*settings, f"run.name={name}", *more))


@pytest.fixture
def finished(config, tmp_path: Path) -> Path:
    """Write the files of a finished run with the checkpoint of its last step."""
    first, run_dir = config("first"), tmp_path / "first"
    identity = finished_runs.build_identity(run_dir, first, DATA)["identity"]
    checkpoint = run_dir / "checkpoints/step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").write_text("marker")
    (checkpoint / "rank_00000.safetensors").write_bytes(b"weights")
    (run_dir / "provenance.json").write_text(json.dumps({"identity": identity, "host": "a"}))
    (run_dir / "metrics.jsonl").write_text('{"step": 2, "attempt": 1, "time": 1.0}\n')
    open_events_log(run_dir).append({"event": "finish", "step": 2, "attempt": 1, "time": 1.0})
    finished_runs.record_finished_run(first)
    return run_dir


def test_a_copy_has_the_rollbacks(finished: Path, config, tmp_path: Path) -> None:
    rollbacks, copied = (
        tmp_path / f"{name}/checkpoints/rollbacks.json" for name in ("first", "second")
    )
    rollbacks.write_text('[{"to": 1, "skipped": [1, 2]}]')
    copied.parent.mkdir(parents=True)
    copied.write_text("of an interrupted copy")
    assert run_copy.use_finished_run(config("second"), "", [])
    assert copied.read_bytes() == rollbacks.read_bytes()
    assert not copied.samefile(rollbacks)


def test_a_second_name_is_a_copy(finished: Path, config, tmp_path: Path, capsys) -> None:
    assert run_copy.use_finished_run(config("second"), "run: {name: second}", ["run.name=second"])
    assert f"{tmp_path / 'second'} is now a copy of it" in capsys.readouterr().out
    second = tmp_path / "second"
    for name in ("metrics.jsonl", "events.jsonl", "checkpoints/step_00000002/COMMITTED"):
        assert (second / name).read_bytes() == (finished / name).read_bytes()
    weights = "checkpoints/step_00000002/rank_00000.safetensors"
    assert (second / weights).samefile(finished / weights)
    assert (second / "config.yaml").read_text() == "run: {name: second}"
    recorded = json.loads((second / "provenance.json").read_text())
    assert (recorded["copy_of"], recorded["copied_steps"], recorded["host"]) == ("first", 2, "a")
    assert finished_runs.get_copied_steps(second) == 2
    assert run_copy.use_finished_run(config("second"), "", [])
    assert "is now a copy" not in capsys.readouterr().out, "the command is repeated"
    extended = finished_runs.build_identity(second, config("second", "run.steps=3"), DATA)
    assert extended == {"identity": None, "copied_steps": 2}
    shutil.rmtree(finished)
    assert (second / weights).read_bytes() == b"weights"
    assert not run_copy.use_finished_run(config("second"), "", []), "it is resumed"


def test_a_copy_between_file_systems(finished: Path, config, tmp_path: Path, monkeypatch) -> None:
    def refuse(*paths: object, **options: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(run_copy.os, "link", refuse)
    destination = f"checkpoint.destination={tmp_path / 'elsewhere'}"
    assert run_copy.use_finished_run(config("second"), "", [])
    assert not run_copy.use_finished_run(config("third", destination), "", []), "another setting"
    weights = tmp_path / "second/checkpoints/step_00000002/rank_00000.safetensors"
    assert weights.read_bytes() == b"weights"
    assert weights.stat().st_nlink == 1


def test_only_the_first_process_of_a_job_copies(
    finished: Path, config, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HLAT_RDZV_ENDPOINT", "host:1")
    monkeypatch.setenv("HLAT_NODES", "2")
    monkeypatch.setenv("HLAT_NODE", "1")
    assert run_copy.use_finished_run(config("second"), "", [])
    assert not (tmp_path / "second").exists()
    monkeypatch.setenv("HLAT_NODE", "0")
    assert run_copy.use_finished_run(config("second"), "", [])
    monkeypatch.setenv("HLAT_NODE", "1")
    assert run_copy.use_finished_run(config("second"), "", []), "the copy is complete"


def test_an_interrupted_copy_is_completed(finished: Path, config, tmp_path: Path) -> None:
    assert run_copy.use_finished_run(config("second"), "", [])
    events = open_events_log(tmp_path / "second").path
    events.unlink()  # it is written last
    assert run_copy.use_finished_run(config("second"), "", [])
    assert events.read_bytes() == open_events_log(finished).path.read_bytes()


def test_a_copy_with_other_settings_is_resumed(finished: Path, config) -> None:
    assert run_copy.use_finished_run(config("second"), "", [])
    longer = config("longer", "run.steps=3")
    run_dir = finished.with_name("longer")
    shutil.copytree(finished, run_dir)
    (run_dir / "checkpoints/step_00000002").rename(run_dir / "checkpoints/step_00000003")
    (run_dir / "provenance.json").unlink()
    identity = finished_runs.build_identity(run_dir, longer, DATA)
    (run_dir / "provenance.json").write_text(json.dumps(identity))
    finished_runs.record_finished_run(longer)
    assert run_copy.use_finished_run(config("third", "run.steps=3"), "", [])
    assert not run_copy.use_finished_run(config("second", "run.steps=3"), "", [])


def test_a_run_is_trained_if_the_checkpoint_was_removed(finished: Path, config) -> None:
    shutil.rmtree(finished / "checkpoints")
    assert not run_copy.use_finished_run(config("second"), "", [])


def test_links_of_a_run_of_others_are_not_followed(finished: Path, config, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (finished / "checkpoints/step_00000002/state.json").symlink_to(secret)
    assert run_copy.use_finished_run(config("second"), "", [])
    assert not (tmp_path / "second/checkpoints/step_00000002/state.json").exists()
    (finished / "milestones").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="milestones is a symbolic link"):
        run_copy.use_finished_run(config("third"), "", [])
    assert not (tmp_path / "third").exists()


def save_trunk(directory: Path, digest: str) -> Path:
    """Write the commit marker of a checkpoint of a trunk."""
    checkpoint = directory / "checkpoints/step_00000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "COMMITTED").write_text(digest)
    return checkpoint


def finish_branch(config: Config, start: dict[str, object]) -> None:
    """Write the files of a finished branch; `start` are fields of the event of its start."""
    run_dir, times = build_run_dir(config.run), {"attempt": 1, "time": 1.0}
    (run_dir / "checkpoints/step_00000002").mkdir(parents=True)
    open_events_log(run_dir).append({"event": "resume", "step": 1, **times, **start})
    identity = finished_runs.build_identity(run_dir, config, DATA)
    (run_dir / "provenance.json").write_text(json.dumps(identity))
    (run_dir / "metrics.jsonl").write_text('{"step": 2, "attempt": 1, "time": 1.0}\n')
    open_events_log(run_dir).append({"event": "finish", "step": 2, **times})
    finished_runs.record_finished_run(config)


def test_a_branch_is_found_by_the_digest_of_its_start(config, tmp_path: Path) -> None:
    trunk, equal, other = (
        save_trunk(tmp_path / name, digest * 64)
        for name, digest in (("trunk", "a"), ("equal", "a"), ("other", "b"))
    )
    finish_branch(config("first", f"checkpoint.start_from={trunk}"), {"manifest_sha256": "a" * 64})

    def is_reused(name: str, start: Path | None) -> bool:
        given = config(name, *([f"checkpoint.start_from={start}"] if start else []))
        return run_copy.use_finished_run(given, "", [])

    assert is_reused("second", equal)
    assert is_reused("third", equal.parent.parent), "its newest checkpoint"
    assert not is_reused("fourth", other)
    assert not is_reused("fifth", None)
    save_trunk(tmp_path / "trunk", "b" * 64)
    assert not is_reused("sixth", trunk), "another trunk at the same path"
    assert not is_reused("seventh", tmp_path / "nowhere")


def test_a_branch_with_an_unknown_start_is_not_found(config, tmp_path: Path) -> None:
    trunk = save_trunk(tmp_path / "trunk", "a" * 64)
    branch = config("first", f"checkpoint.start_from={trunk}")
    finish_branch(branch, {})
    assert finished_runs.find_finished_run(config("second")) is None
    assert not run_copy.use_finished_run(branch, "", [])


def test_campaigns_of_a_root_use_runs_of_each_other(config, tmp_path: Path) -> None:
    def build(campaign: str, *more: str) -> Config:
        (tmp_path / campaign).mkdir(exist_ok=True)
        return config("trunk", f"run.root={tmp_path / campaign}", *more)

    for name in ("a", "b"):
        build(name)
        (tmp_path / name / "campaign.json").write_text("[]")
    finish_branch(build("a"), {"event": "start", "step": 0})
    assert not run_copy.use_finished_run(build("c"), "", []), "not a campaign"
    destination = f"checkpoint.destination={tmp_path / 'd'}"
    assert not run_copy.use_finished_run(build("b", destination), "", [])
    assert run_copy.use_finished_run(build("b"), "", [])
    assert (tmp_path / "b/trunk/checkpoints/step_00000002").is_dir()


def test_copies_are_no_further_samples() -> None:
    trained, other = {"identity": {"config": "a"}}, {"identity": {"config": "b"}}
    copy = {**trained, "copy_of": "first"}
    assert finished_runs.find_distinct([copy, trained, other, copy]) == [1, 2]
    assert finished_runs.find_distinct([copy, copy, other]) == [0, 2]
    assert finished_runs.find_distinct([{"identity": None}, {}, {"copy_of": None}]) == [0, 1, 2]
