"""Points of a scaling law from runs: counts, omitted runs, groups and missing metrics."""

from pathlib import Path

import pytest

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.study.run_record import load_run_record
from hlat.study.scaling_points import PointColumns
from hlat.study.scaling_runs import build_config_values, load_run_points
from tests.unit.study.scaling_data import write_runs

COLUMNS = PointColumns("parameters", None, None, "heldout_bits_per_byte")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_runs(tmp_path / "runs", num_tokens=1)
    return tmp_path / "runs"


def replace_event(run_dir: Path, old: str, new: str) -> None:
    events = run_dir / "events.jsonl"
    assert old in events.read_text()
    events.write_text(events.read_text().replace(old, new))


def test_runs_have_the_values_of_their_specification(root: Path) -> None:
    """Compare with counts by hand: 4 layers of GQA and SwiGLU, embedding and head."""
    points, notes = load_run_points([root], COLUMNS)
    assert not notes
    index = next(i for i, name in enumerate(points.names) if "h128-1-1" in name)
    embedding, layer = 4096 * 128, 128 * (128 + 64 + 64 + 128) + 3 * 128 * 352 + 2 * 128
    total = 4 * layer + 2 * embedding + 128
    assert points.parameters[index] == total
    assert points.other_parameters is not None
    assert points.other_parameters[index] == total - embedding
    assert points.tokens[index] == 4e8
    record = load_run_record(Path(points.names[index]))
    assert points.flops[index] == pytest.approx(record.flops_per_token * 4e8)


def test_configuration_has_the_values_of_its_run() -> None:
    overrides = ["model=tiny", "run.steps=10", "batch.global_batch_size=8"]
    config = resolve_config(compose_config([*overrides, "batch.sequence_length=256"]))
    values = build_config_values(config)
    assert values["tokens"] == 10 * 8 * 256
    assert values["parameters"] - values["parameters_without_embedding"] == 4096 * 128


def test_repeated_data_is_omitted(root: Path) -> None:
    replace_event(root / "h64-1-1", '"epochs": 0.5', '"epochs": 3.0')
    points, notes = load_run_points([root], COLUMNS)
    assert len(points) == 5
    text = "1 runs that read a source more than once (up to 3 epochs)"
    assert notes == [f"omitted {text}; repeated=true includes them"]
    points, notes = load_run_points([root], COLUMNS, with_repeated=True)
    assert (len(points), notes) == (6, [f"fitted with {text}"])


def test_unfinished_runs_are_counted(root: Path) -> None:
    replace_event(root / "h64-1-1", '"finish"', '"diverge"')
    points, notes = load_run_points([root], COLUMNS)
    assert (len(points), notes) == (5, ["omitted 1 runs that have not finished"])


def test_runs_are_selected_and_grouped(root: Path) -> None:
    columns = PointColumns("parameters", None, None, "final_loss", "run.seed")
    points, _ = load_run_points([root / "h64-1-1", root], columns, "run.seed=1")
    assert [Path(name).name for name in points.names] == [
        "h64-1-1",
        "h128-1-1",
        "h256-1-1",
    ]
    assert set(points.groups) == {"1"}
    assert points.losses[0] == load_run_record(root / "h64-1-1").metrics[-1]["loss"]


def test_a_metric_that_is_not_positive_names_the_run(root: Path) -> None:
    replace_event(root / "h64-1-1", '"mean"', '"other"')
    with pytest.raises(ConfigError) as caught:
        load_run_points([root], COLUMNS)
    message = "h64-1-1: heldout_bits_per_byte=None is not a number above 0; omit the run"
    assert message in str(caught.value)
