"""Parsing of nccom-test output; examples from its user guide (AWS Neuron documentation)."""

import stat
from pathlib import Path

import pytest

from hlat.config.resolve import resolve_config
from hlat.recovery import nccom_bandwidth
from hlat.recovery.nccom_bandwidth import parse_nccom_output

ONE_SIZE = """\
         size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
        33554432        33554432    uint8         768          40.69          40.69
    Avg bus bandwidth:      40.6901GB/s
"""
SIZES = """\
       size(B)    count(elems)    type    time(us)    algbw(GB/s)    busbw(GB/s)
             8               2    fp32         520           0.00           0.00
     536870912       134217728    fp32       21803          22.93          45.15
    1073741824       268435456    fp32       41806          23.92          47.09
Avg bus bandwidth:      9.3924GB/s
"""
FAILED = """\
     size(B)    count(elems)    type    time(us)    algbw(GB/s)    busbw(GB/s)
    33554432    Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log
1 errors found - test failed
"""


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (ONE_SIZE, 40.69 * 2**30),
        (SIZES, 47.09 * 2**30),
        (FAILED, "1 errors found - test failed"),
        ("Neuron DKMS Driver is not running!", "Neuron DKMS Driver is not running!"),
        ("", "no output"),
    ],
)
def test_parse_output(output: str, found: float | str) -> None:
    assert parse_nccom_output(output) == found


@pytest.fixture
def fake_nccom_test(tmp_path: Path, monkeypatch):
    """Put an nccom-test on PATH that records its arguments and runs the given commands."""

    def make(commands: str) -> Path:
        path = tmp_path / "nccom-test"
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/given\n{commands}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "given"

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return make


def test_all_cores_of_a_trainium_node_are_tested(fake_nccom_test, compose) -> None:
    trn1 = resolve_config(compose("hardware=trn1_32xl", "batch.global_batch_size=32")).hardware
    assert not nccom_bandwidth.is_nccom_test_available(trn1)
    given = fake_nccom_test(f"cat <<'END'\n{ONE_SIZE}END")
    assert nccom_bandwidth.is_nccom_test_available(trn1)
    assert not nccom_bandwidth.is_nccom_test_available(resolve_config(compose()).hardware)
    assert nccom_bandwidth.run_nccom_test(trn1) == 40.69 * 2**30
    assert given.read_text() == "-r 32 -d fp32 --check allr\n"


def test_a_hanging_program_times_out(fake_nccom_test, compose, monkeypatch) -> None:
    trn1 = resolve_config(compose("hardware=trn1_32xl", "batch.global_batch_size=32")).hardware
    monkeypatch.setattr(nccom_bandwidth, "_TIMEOUT_S", 0.2)
    fake_nccom_test("exec sleep 60")
    assert "timed out" in str(nccom_bandwidth.run_nccom_test(trn1))
