"""Counters of neuron-monitor, from a script that prints the format that AWS documents."""

import json
import os
import time
from pathlib import Path

import pytest

from hlat.tracking.neuron_monitor import PROGRAM, NeuronMonitor, parse_report

RUNTIME = {
    "pid": 6456,
    "address": "",
    "neuron_runtime_tag": "my_app_1",
    "error": "",
    "report": {
        "neuroncore_counters": {
            "period": 1.0,
            "neuroncores_in_use": {
                "0": {"neuroncore_utilization": 42.0},
                "1": {"neuroncore_utilization": 58.0},
            },
            "error": "",
        },
        "execution_stats": {
            "period": 1.0,
            "error_summary": {"generic": 0, "numerical": 1, "transient": 0, "model": 0, "runtime": 2, "hardware": 0},
            "execution_summary": {"completed": 123, "completed_with_err": 0},
            "error": "",
        },
        "memory_used": {
            "period": 1.0,
            "neuron_runtime_used_bytes": {
                "host": 6_997_643_264,
                "neuron_device": 12_519_788_544,
                "usage_breakdown": {"host": {}, "neuroncore_memory_usage": {}},
            },
            "loaded_models": [],
            "error": "",
        },
    },
}  # fmt: skip
REPORT = {
    "neuron_runtime_data": [RUNTIME, RUNTIME],
    "system_data": {
        "neuron_hw_counters": {
            "period": 1.0,
            "neuron_devices": [
                {"neuron_device_index": 0, "mem_ecc_corrected": 9, "mem_ecc_uncorrected": 1, "sram_ecc_uncorrected": 0},
                {"neuron_device_index": 1, "mem_ecc_corrected": 0, "mem_ecc_uncorrected": 0, "sram_ecc_uncorrected": 3},
            ],
            "error": "",
        },
        "memory_info": {"period": 1.0, "memory_total_bytes": 532_523_487_232, "error": ""},
    },
}  # fmt: skip
EXPECTED = {
    "neuroncore_utilization": 50.0,
    "neuron_device_bytes": 2 * 12_519_788_544,
    "neuron_host_bytes": 2 * 6_997_643_264,
    "neuron_execution_errors": 6,
    "neuron_ecc_uncorrected": 4,
}


@pytest.fixture
def install_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs a shell script as the program."""

    def install(script: str) -> None:
        file = tmp_path / PROGRAM
        file.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def _wait_until(get_value, expected) -> None:
    ends = time.monotonic() + 30
    while get_value() != expected:
        assert time.monotonic() < ends, get_value()
        time.sleep(0.01)


def _is_alive(tmp_path: Path) -> bool:
    return Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_report_is_summed_over_the_machine() -> None:
    assert parse_report(REPORT) == EXPECTED


@pytest.mark.parametrize(
    "report",
    [None, [], {}, {"neuron_runtime_data": None}, {"neuron_runtime_data": [None, {"report": [1]}]},
     {"neuron_runtime_data": [{"report": {"neuroncore_counters": {"neuroncores_in_use": {"0": None}}}}]},
     {"system_data": {"neuron_hw_counters": {"neuron_devices": [{"mem_ecc_uncorrected": "x"}]}}}],
)  # fmt: skip
def test_report_without_counters_is_empty(report: object) -> None:
    assert parse_report(report) == {}


def test_newest_complete_report_is_returned(install_program, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT) + "\n")
    install_program(f"echo '{{}}'; echo '{{torn'; cat {tmp_path}/report.json; echo; exec sleep 600")
    monitor = NeuronMonitor()
    try:
        _wait_until(monitor.get_latest, EXPECTED)
    finally:
        monitor.close()
    assert monitor.get_latest() == {}
    assert not _is_alive(tmp_path)


def test_ended_program_has_no_report(install_program, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT) + "\n")
    install_program(f"cat {tmp_path}/report.json; read line < {tmp_path}/go")
    os.mkfifo(tmp_path / "go")
    monitor = NeuronMonitor()
    _wait_until(monitor.get_latest, EXPECTED)
    (tmp_path / "go").write_text("\n")
    _wait_until(monitor.get_latest, {})
    monitor.close()


@pytest.mark.slow
def test_program_that_ignores_sigterm_is_killed(install_program, tmp_path: Path) -> None:
    install_program("trap '' TERM; while :; do sleep 0.1; done")
    monitor = NeuronMonitor()
    _wait_until((tmp_path / "pid").exists, True)
    _wait_until(lambda: (tmp_path / "pid").read_text().endswith("\n"), True)
    monitor.close()
    assert not _is_alive(tmp_path)


def test_missing_program_has_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monitor = NeuronMonitor()
    assert monitor.get_latest() == {}
    monitor.close()


def test_unusable_program_has_no_report(install_program, tmp_path: Path) -> None:
    install_program("")
    (tmp_path / PROGRAM).write_text("#!/no/such/shell\n")
    monitor = NeuronMonitor()
    assert monitor.get_latest() == {}
    monitor.close()
