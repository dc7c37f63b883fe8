"""A record contains all readable lines and the number of the others."""

import math
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from hlat.config import recorded_config
from hlat.config.compose import compose_config
from hlat.config.recorded_config import parse_run_config
from hlat.config.run import Config
from hlat.study import run_record
from hlat.study.run_record import load_run_record


@pytest.mark.parametrize(
    "torn",
    ['{"step": 1}, {"step": 2}', '{"step": 1', "[]", "3", '{"step": {}', '"x": {}}', "{" * 100_000],
)
def test_unreadable_lines_are_counted_and_others_are_read(tmp_path: Path, torn: str) -> None:
    lines = ['{"step": 5}', torn, "", '{"step": 6}', '{"step": 7}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = load_run_record(tmp_path)
    assert [row["step"] for row in found.metrics] == [5, 6, 7]
    assert found.num_unreadable == 1


def test_columns_contain_numeric_values_only(tmp_path: Path) -> None:
    rows = ['{"a": 1}', '{"a": 2.5}', '{"a": null}', "{}", '{"a": "7"}', '{"a": [1]}', '{"a": NaN}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    found = load_run_record(tmp_path)
    expected = [1.0, 2.5, *[math.nan] * 5]
    np.testing.assert_array_equal(found.get_column("a"), expected)
    np.testing.assert_array_equal(found.get_column("b"), [math.nan] * 7)
    assert found.get_column("a") is found.get_column("a")


def test_profiles_are_read_in_the_order_of_steps_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder = tmp_path / "profiles"
    folder.mkdir()
    for name in ("step_10_rank_0", "step_9_rank_10", "step_9_rank_2"):
        (folder / f"{name}_account.json").write_text('{"seconds": 1.5}')
    (folder / "step_11_rank_0_account.json").write_text('{"seconds": ')
    (folder / "step_12_rank_0_account.json").write_text("[1]")
    (folder / "step_x_rank_0_account.json").write_text('{"seconds": 1}')
    (folder / "step_13_rank_0_modules.csv").write_text("module\n")
    found = load_run_record(tmp_path).profiles
    assert [*found] == ["step_9_rank_2", "step_9_rank_10", "step_10_rank_0"]
    assert found["step_10_rank_0"] == {"seconds": 1.5}


def test_equal_sections_of_several_runs_are_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "_PARSED_MODEL_SETTINGS", {})
    parsed: list[str] = []

    def parse(text: str) -> Config:
        parsed.append(text)
        return parse_run_config(text)

    monkeypatch.setattr(run_record, "parse_run_config", parse)
    records = []
    for number, layers in enumerate([2, 2, 3]):
        overrides = [
            f"run.seed={number}",
            f"optimizer.lr={number + 1}e-4",
            f"model.num_layers={layers}",
        ]
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(compose_config(overrides)))
        records.append(load_run_record(run_dir))
    flops = [record.flops_per_token for record in records]
    assert len(parsed) == 2
    assert flops[0] == flops[1] != flops[2]
    for record in records:
        config = parse_run_config(record.config)
        assert record.model_settings == (config.model, config.batch, config.hardware)


def test_equal_designs_of_several_runs_are_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_config._parse_study_design.cache_clear()
    parsed = []
    parse_section = recorded_config.parse_section
    monkeypatch.setattr(
        recorded_config,
        "parse_section",
        lambda schema, fields: parsed.append(fields) or parse_section(schema, fields),
    )
    questions = ["How fast?", "How fast?", "What!", None]
    for number, question in enumerate(questions):
        composed = compose_config([f"run.seed={number}"])
        composed.study.question = question
        composed.study.baseline = {"optimizer.lr": 1e-3}
        (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(composed))
        design = load_run_record(tmp_path).study_design
        assert (design.question, design.baseline) == (question, {"optimizer.lr": 1e-3})
    assert len(parsed) == 3


@pytest.mark.parametrize(
    "text", ['"study": {alpha: 0.5}', "run: {}\nstudy: {alpha: 0.5}", "{study: {alpha: 0.5}}"]
)
def test_a_design_in_other_notations_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(f"{text}\n")
    assert load_run_record(tmp_path).study_design.alpha == 0.5


def test_runs_without_a_valid_configuration_have_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {num_layers: many}\n")
    record = load_run_record(tmp_path)
    assert record.model_settings is None
    assert math.isnan(record.flops_per_token)
