"""What was measured beside what was planned, and what is said where either is missing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hlat.config.errors import ConfigError
from hlat.config.resolve import resolve
from hlat.config.told import run_of
from hlat.planning.memory import estimate
from hlat.planning.step_time import predict
from hlat.reporting import expectation
from hlat.reporting.record import Record
from hlat.reporting.report import write_report

TRN1 = ("model=7b", "hardware=trn1_32xl", "hardware.nodes=4", "engine=nxd", "compiler=neuron_2_28")


def rows(**changes: Any) -> list[dict[str, Any]]:
    row = {"step_seconds": 2.0, "data_wait_seconds": 0.25, "memory_bytes": 3 * 2**30} | changes
    return [row, row | {"step_seconds": 4.0}, row]


def record(config: DictConfig | str, metrics: list[dict[str, Any]]) -> Record:
    text = config if isinstance(config, str) else OmegaConf.to_yaml(config)
    return Record("run", metrics, [], text, {}, 0)


def test_parts_are_the_planners_and_the_rest_was_measured(
    compose: Callable[..., DictConfig],
) -> None:
    composed = compose(*TRN1)
    config = resolve(composed)
    memory, time = expectation.parts(record(composed, rows()))
    assert sum(memory.planned.values()) == pytest.approx(estimate(config).total / 2**30)
    assert memory.measured == 3
    assert sum(time.planned.values()) == pytest.approx(predict(config).total)
    assert time.measured == 2
    assert time.note == "Measured: the median, with 0.25 s that waited for data."
    table = expectation.table([memory, time])
    assert table[-1][:2] == ("time of a step, s", "all")
    assert table[-1][3] == "2"
    assert float(table[-1][4].removesuffix(" %")) == pytest.approx(
        100 * (predict(config).total / 2 - 1), rel=1e-2
    )
    drawn = expectation.picture([memory, time])
    assert "measured 2" in drawn.svg()
    assert drawn.description.startswith("Memory of the fullest device, GiB: planned ")


def test_no_time_is_told_of_hardware_without_constants(compose: Callable[..., DictConfig]) -> None:
    memory, time = expectation.parts(record(compose(), rows(memory_bytes=None)))
    assert time.planned == {}
    assert "hardware=cpu has no constants" in time.note
    assert memory.measured is None
    *_, last = expectation.table([memory, time])
    assert last == ("time of a step, s", "all", "n/a", "2", "n/a")


def test_a_configuration_of_another_kind_is_told_and_the_page_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimzer"):
        expectation.parts(record("optimzer: {lr: 1}\n", rows()))
    (tmp_path / "config.yaml").write_text("optimzer: {lr: <b>}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens": 2, "loss": 3.0}))
    html = write_report(tmp_path).read_text()
    assert "Nothing is planned: " in html
    assert "<b>" not in html
    assert not (tmp_path / "figures/plan.svg").exists()


def test_what_a_resolver_would_tell_stays_as_it_was_typed(
    compose: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "canary-5f2d9c")
    composed = compose("data.root=${oc.env:A_SECRET}")
    memory, _ = expectation.parts(record(composed, rows()))
    assert memory.planned
    assert run_of(OmegaConf.to_yaml(composed)).data.root == "${oc.env:A_SECRET}"
