"""Comparison of measured and planned values, and missing values."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.recorded_config import parse_run_config
from hlat.config.resolve import resolve_config
from hlat.plan import plan_figure
from hlat.plan.memory_estimate import estimate_memory
from hlat.plan.step_time import predict_step_time
from hlat.report.report_writer import write_report
from hlat.study.run_record import RunRecord

TRN1 = ("model=7b", "hardware=trn1_32xl", "hardware.nodes=4", "engine=nxd", "compiler=neuron_2_28")


def rows(**changes: Any) -> list[dict[str, Any]]:
    row = {"step_seconds": 2.0, "data_wait_seconds": 0.25, "memory_bytes": 3 * 2**30} | changes
    return [row, row | {"step_seconds": 4.0}, row]


def record(config: DictConfig | str, metrics: list[dict[str, Any]]) -> RunRecord:
    text = config if isinstance(config, str) else OmegaConf.to_yaml(config)
    return RunRecord("run", metrics, [], text, {}, 0)


@pytest.mark.slow
def test_comparison_contains_planned_terms_and_measured_values(
    compose: Callable[..., DictConfig],
) -> None:
    composed = compose(*TRN1)
    config = resolve_config(composed)
    memory, time = plan_figure.compare_with_plan(record(composed, rows()))
    assert sum(memory.planned.values()) == pytest.approx(estimate_memory(config).total / 2**30)
    assert memory.measured == 3
    assert sum(time.planned.values()) == pytest.approx(predict_step_time(config).total)
    assert time.measured == 2
    assert time.note == "Measured: the median, including 0.25 s of waiting for data."
    table = plan_figure.build_plan_comparison_table([memory, time])
    assert table[-1][:2] == ("time of a step, s", "all")
    assert table[-1][3] == "2"
    assert float(table[-1][4].removesuffix(" %")) == pytest.approx(
        100 * (predict_step_time(config).total / 2 - 1), rel=1e-2
    )
    drawn = plan_figure.build_plan_comparison_figure([memory, time])
    assert "measured 2" in drawn.render_svg()
    assert drawn.alt_text.startswith("Memory of the fullest device, GiB: planned ")


def test_step_time_is_not_planned_without_hardware_constants(
    compose: Callable[..., DictConfig],
) -> None:
    memory, time = plan_figure.compare_with_plan(record(compose(), rows(memory_bytes=None)))
    assert time.planned == {}
    assert "hardware=cpu has no constants" in time.note
    assert math.isnan(memory.measured)
    *_, last = plan_figure.build_plan_comparison_table([memory, time])
    assert last == ("time of a step, s", "all", "n/a", "2", "n/a")


def test_page_of_an_invalid_configuration_contains_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimzer"):
        plan_figure.compare_with_plan(record("optimzer: {lr: 1}\n", rows()))
    (tmp_path / "config.yaml").write_text("optimzer: {lr: <b>}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens": 2, "loss": 3.0}))
    html = write_report(tmp_path).read_text()
    assert "No plan: " in html
    assert "<b>" not in html
    assert not (tmp_path / "figures/plan.svg").exists()


def test_interpolations_are_not_resolved(
    compose: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "canary-5f2d9c")
    composed = compose("data.root=${oc.env:A_SECRET}")
    memory, _ = plan_figure.compare_with_plan(record(composed, rows()))
    assert memory.planned
    assert parse_run_config(OmegaConf.to_yaml(composed)).data.root == "${oc.env:A_SECRET}"
