"""Validation of checkpoint.start_from before a run is submitted."""

import dataclasses
import json
from pathlib import Path

import pytest

from hlat.checkpoint.start_validation import (
    build_last_state,
    find_replaced_start,
    find_start_problems,
    load_start_digest,
    validate_start,
)
from hlat.checkpoint.training_state import TrainingState
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.tracking.jsonl_log import open_events_log


@pytest.fixture
def resolve(compose):
    return lambda *overrides: resolve_config(compose("run.steps=20", *overrides))


@pytest.fixture
def first(compose, tmp_path: Path) -> Path:
    """Write the state of step 10 of a run."""
    state = build_last_state(resolve_config(compose("run.steps=10")))
    checkpoint = tmp_path / "first/checkpoints/step_00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(state.to_json()))
    (checkpoint / "COMMITTED").write_text("a" * 64)
    return tmp_path / "first"


@pytest.mark.parametrize("location", ["", "checkpoints/step_00000010"])
def test_a_run_or_checkpoint_is_compared(first: Path, resolve, tmp_path: Path, location) -> None:
    start = f"checkpoint.start_from={first / location}"
    validate_start(resolve(start), tmp_path / "second")
    with pytest.raises(ConfigError) as caught:
        validate_start(resolve(start, "run.seed=3"), tmp_path / "second")
    path = first / "checkpoints/step_00000010"
    assert caught.value.problems[0].startswith(
        f"cannot start from checkpoint.start_from at {path}: run.seed: the checkpoint was written"
    )


def test_a_run_with_own_checkpoints_resumes(first: Path, resolve, tmp_path: Path) -> None:
    (tmp_path / "second/checkpoints/step_00000012").mkdir(parents=True)
    start = f"checkpoint.start_from={first}"
    validate_start(resolve(start, "run.seed=3"), tmp_path / "second")


def test_a_replaced_start_is_reported(first: Path, resolve, tmp_path: Path) -> None:
    checkpoint, run_dir = first / "checkpoints/step_00000010", tmp_path / "second"
    config, newest = (resolve(f"checkpoint.start_from={path}") for path in (checkpoint, first))
    assert load_start_digest(config) == load_start_digest(newest) == "a" * 64
    assert load_start_digest(resolve()) is None
    assert load_start_digest(resolve("checkpoint.start_from=/nowhere")) is None
    row = {"event": "resume", "step": 10, "attempt": 1, "time": 1.0, "manifest_sha256": "a" * 64}
    run_dir.mkdir()
    open_events_log(run_dir).append(row)
    assert find_replaced_start(config, run_dir) is None
    (checkpoint / "COMMITTED").write_text("b" * 64)
    problem = find_replaced_start(config, run_dir)
    assert problem is not None
    assert (
        f"checkpoint.start_from={checkpoint} has {'b' * 64}; to start from this one, choose"
        in problem
    )
    assert find_replaced_start(newest, run_dir) is None, "its newest checkpoint may change"
    assert find_replaced_start(config, tmp_path / "of another version") is None
    (checkpoint / "COMMITTED").unlink()
    assert find_replaced_start(config, run_dir) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", None])
def test_a_missing_or_damaged_checkpoint_is_left_to_the_run(
    first: Path, resolve, tmp_path: Path, content: str | None
) -> None:
    file = first / "checkpoints/step_00000010/state.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    for start in (first, "/nowhere"):
        config = resolve(f"checkpoint.start_from={start}", "run.seed=3")
        validate_start(config, tmp_path / "second")  # raises nothing
        assert not (tmp_path / "second").exists()


def test_start_problems_by_what_a_checkpoint_contains(compose):
    """A campaign compares two configurations, and a run its own one with a checkpoint."""

    def find(*overrides: str, saved: TrainingState | None = None, same: bool = False) -> list[str]:
        config = resolve_config(compose("run.steps=20", *overrides))
        return find_start_problems(config, saved or before, "PATH", same)

    before = build_last_state(resolve_config(compose("run.steps=10")))
    assert find() == find("optimizer.lr=1") == find("run.steps=10", same=True) == []
    imported = dataclasses.replace(before, fixed=before.fixed | {"model.init_from": "x"})
    assert find(saved=imported) == []
    assert "model.init_from was x, is None" in find(saved=imported, same=True)[0]
    (problem,) = find("run.steps=10")
    assert problem.startswith("it has step 10, and the run ends at step 10; increase run.steps")
    changed = ("batch.sequence_length=32", "batch.global_batch_size=4", "run.seed=3")
    assert [line.partition(":")[0] for line in find(*changed)] == [
        "batch.global_batch_size",
        "batch.sequence_length",
        "run.seed",
    ]
    accepted = "data.allow_changed=[run.seed,batch.sequence_length]"
    assert len(find(*changed, accepted)) == 2, "never the batch"
    (problem,) = find("~data.sources.code")
    assert problem.startswith("data.sources.code: the checkpoint was written with a source, this")
    (problem,) = find("model.hidden_size=64")
    assert "model.hidden_size was 128, is 64; set it back" in problem
    other = dataclasses.replace(before, adjustable=before.adjustable | {"optimizer.name": "lion"})
    assert find(saved=other) == find(saved=other, same=True) == []
    (problem,) = find(saved=dataclasses.replace(before, weights_only=True))
    assert "hlat export PATH output=DIR, then model.init_from=DIR" in problem


def test_hashes_of_files_are_not_compared_before_they_are_opened(compose):
    config = resolve_config(compose("run.steps=10"))
    saved = build_last_state(config)
    hashes = {"data.tokenizer": "sha", "data.sources.code": {"rows": 3}}
    saved.data["fingerprint"].update(hashes)
    assert find_start_problems(config, saved, "PATH", is_same_run=True) == []
