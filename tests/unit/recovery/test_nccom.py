"""What nccom-test prints, from the examples of its user guide (AWS Neuron documentation)."""

import stat
from pathlib import Path

import pytest

from hlat.config.resolve import resolve
from hlat.recovery import nccom
from hlat.recovery.nccom import Nccom, parse

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
        (ONE_SIZE, Nccom(40.69 * 2**30)),
        (SIZES, Nccom(47.09 * 2**30)),
        (FAILED, Nccom(problem="1 errors found - test failed")),
        ("Neuron DKMS Driver is not running!", Nccom(problem="Neuron DKMS Driver is not running!")),
        ("", Nccom(problem="it printed nothing")),
    ],
)
def test_the_table_is_read(output: str, found: Nccom) -> None:
    assert parse(output) == found


@pytest.fixture
def program(tmp_path: Path, monkeypatch):
    """Put a program of this name on the path that prints what it was given, then a table."""

    def make(last_words: str) -> Path:
        path = tmp_path / "nccom-test"
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/given\n{last_words}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "given"

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return make


def test_all_cores_of_a_trainium_node_are_asked(program, compose) -> None:
    trn1 = resolve(compose("hardware=trn1_32xl", "batch.global_batch_size=32")).hardware
    assert not nccom.wanted(trn1)
    given = program(f"cat <<'END'\n{ONE_SIZE}END")
    assert nccom.wanted(trn1)
    assert not nccom.wanted(resolve(compose()).hardware)
    assert nccom.measure(trn1) == Nccom(40.69 * 2**30)
    assert given.read_text() == "-r 32 -d fp32 --check allr\n"


def test_a_program_that_hangs_is_left(program, compose, monkeypatch) -> None:
    trn1 = resolve(compose("hardware=trn1_32xl", "batch.global_batch_size=32")).hardware
    monkeypatch.setattr(nccom, "_TIMEOUT_S", 0.2)
    program("exec sleep 60")
    assert "timed out" in (nccom.measure(trn1).problem or "")
