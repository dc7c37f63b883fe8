"""Validation of checkpoint.start_from before a run is submitted."""

import json
from pathlib import Path

import pytest

from hlat.checkpoint.start_validation import validate_start
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.training_state import build_last_state


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


@pytest.mark.parametrize("content", ["{", "[]", "{}", None])
def test_a_missing_or_damaged_checkpoint_is_left_to_the_run(
    first: Path, resolve, tmp_path: Path, content: str | None
) -> None:
    file = first / "checkpoints/step_00000010/state.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    validate_start(resolve(f"checkpoint.start_from={first}", "run.seed=3"), tmp_path / "second")
    validate_start(resolve("checkpoint.start_from=/nowhere", "run.seed=3"), tmp_path / "second")
