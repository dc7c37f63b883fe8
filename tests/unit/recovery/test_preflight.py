"""Preflight of all ranks: clock skew, unhealthy nodes and exit codes."""

import json
from typing import Any

import pytest

from hlat.config.config_errors import ConfigError, ExitCode, MissingDeviceError
from hlat.config.resolve import resolve_config
from hlat.distributed.parallel_state import ParallelState
from hlat.engine.interface import DeviceReport
from hlat.recovery import preflight
from hlat.recovery.preflight_checks import Consequence, Finding


class FakeEngine:
    """Engine with a fixed device report."""

    def __init__(self, error: Exception | None = None, **changed: Any) -> None:
        self.parallel_state, self.error, self.closed = ParallelState(), error, False
        well = {"num_products": 9, "num_wrong": 0, "flops_per_s": 1e9, "links": []}
        nothing = {"device": "cpu", "free_bytes": None, "total_bytes": None}
        self.device_report = DeviceReport(**nothing | well | changed)

    def run_device_checks(self, config: Any) -> DeviceReport:
        if self.error is not None:
            raise self.error
        return self.device_report

    def close(self) -> None:
        self.closed = True


class Clocks:
    """Process group of rank 0 for ranks with clocks that are ahead, and slow messages."""

    is_rank0 = True

    def __init__(self, now: list[float], ahead: list[float]) -> None:
        self.now, self.ahead = now, ahead

    def broadcast(self, message: bytes) -> bytes:
        self.now[0] += 0.25
        return message

    def gather_object(self, value: Any) -> list[float]:
        shown = [self.now[0] + ahead for ahead in self.ahead]
        self.now[0] += 0.5
        return shown


def events(folder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_graphs_of_the_checks_are_extracted_and_results_are_not_used(
    monkeypatch, tmp_path, compose
) -> None:
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    config = resolve_config(compose())
    assert preflight.run_preflight(config, tmp_path, FakeEngine(num_wrong=1))
    with pytest.raises(RuntimeError, match="no graph"):
        preflight.run_preflight(config, tmp_path, FakeEngine(RuntimeError("no graph")))
    assert not [*tmp_path.iterdir()]
    off = resolve_config(compose("recovery.preflight=false"))
    assert preflight.run_preflight(off, tmp_path, FakeEngine(RuntimeError("not called")))


def test_clock_bounds_include_the_round_trip(monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(preflight.time, "time", lambda: now[0])
    bounds = preflight.measure_clock_bounds(Clocks(now, [0.0, 7.0, -3.0]))
    assert bounds == [(-0.5, 0.25), (6.5, 7.25), (-3.5, -2.75)]


def test_an_unhealthy_engine_is_closed(compose, tmp_path) -> None:
    config = resolve_config(compose())
    well, ill = FakeEngine(), FakeEngine(num_wrong=2)
    assert preflight.run_preflight(config, tmp_path, well)
    assert not preflight.run_preflight(config, tmp_path, ill)
    assert (well.closed, ill.closed) == (False, True)
    assert [row["event"] for row in events(tmp_path)] == ["preflight", "preflight", "exclude"]


def test_a_node_without_all_devices_is_excluded_at_once(compose, tmp_path, capsys) -> None:
    config = resolve_config(compose("hardware=h100_p5"))
    with pytest.raises(SystemExit) as end:
        preflight.run_preflight(
            config, tmp_path, FakeEngine(MissingDeviceError("this machine has 7"))
        )
    assert end.value.code == ExitCode.UNHEALTHY_NODE
    assert "is unhealthy: this machine has 7; exclude it" in capsys.readouterr().err
    assert [row["event"] for row in events(tmp_path)] == ["exclude"]


def test_a_gpu_run_does_not_fall_back_to_the_cpu(compose, tmp_path) -> None:
    config = resolve_config(compose("hardware=h200", "engine.device=auto"))
    with pytest.raises(ConfigError, match="hardware=h200 has 1 GPU per node, and torch finds none"):
        preflight.run_preflight(config, tmp_path, FakeEngine())
    preflight.run_preflight(resolve_config(compose("engine.device=auto")), tmp_path, FakeEngine())


def test_long_steps_are_estimated_before_the_first_one(compose, tmp_path, capsys) -> None:
    engine = FakeEngine(flops_per_s=1e11)
    preflight.run_preflight(resolve_config(compose("model=160m")), tmp_path, engine)
    out = capsys.readouterr().out
    assert "WARNING: a step of 131,072 tokens takes at least" in out
    assert "100 GFLOP/s of this CPU, and the run has" in out
    preflight.run_preflight(resolve_config(compose()), tmp_path, engine)
    assert capsys.readouterr().out == ""


def test_a_layout_for_too_many_devices_is_an_error(compose, tmp_path) -> None:
    with pytest.raises(ConfigError, match="this machine has 7"):
        preflight.run_preflight(
            resolve_config(compose()),
            tmp_path,
            FakeEngine(MissingDeviceError("this machine has 7")),
        )


def test_reasons_of_many_ranks_are_one_line(compose, tmp_path, capsys) -> None:
    found = [
        Finding("a", rank, "devices", None, None, f"reason {rank}", Consequence.exclude)
        for rank in range(9)
    ]
    preflight.report_unhealthy_nodes(preflight.Tracker(tmp_path, resolve_config(compose())), found)
    (line,) = capsys.readouterr().err.splitlines()
    assert "reason 0; reason 1; reason 2 and 6 more; exclude it" in line
    (event,) = events(tmp_path)
    assert (event["ranks"], len(event["reasons"])) == ([*range(9)], 9)
