"""The GPU that a driver's program reports is the default hardware."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hlat.config import local_hardware
from hlat.config.compose import compose_config
from hlat.config.local_hardware import choose_local_hardware


@pytest.fixture
def write_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts a program on the PATH, which has no other one of a driver."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)

    def write(name: str, *lines: str, code: int = 0) -> None:
        script = "".join(f"echo '{line}'\n" for line in lines)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}exit {code}\n")
        (tmp_path / name).chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("names", "choice"),
    [
        (["NVIDIA H100 80GB HBM3"] * 8, "h100"),
        (["NVIDIA GeForce RTX 5090"], "rtx_5090"),
        (["NVIDIA A100-SXM4-40GB"], "cpu"),
        (["NVIDIA H100 PCIe"], "cpu"),
        (["NVIDIA H200", "NVIDIA GeForce RTX 4090"], "cpu"),
        (["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"], "cpu"),
        ([], "cpu"),
    ],
)
def test_names_of_nvidia_gpus(write_program, names: list[str], choice: str) -> None:
    write_program("nvidia-smi", *names)
    assert choose_local_hardware() == choice


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "AMD Instinct MI300X OAM"])
def test_an_amd_gpu(write_program, name: str) -> None:
    lines = ["WARNING: low power", "device,Card Series,Card SKU", f"card0,{name},M3000"]
    write_program("rocm-smi", *lines)
    assert choose_local_hardware() == "mi300x"


def test_a_driver_that_fails(write_program) -> None:
    write_program("nvidia-smi", "NVIDIA H200", code=9)
    assert choose_local_hardware() == "cpu"


def test_a_driver_that_does_not_answer(write_program, monkeypatch) -> None:
    """Do not wait for the killed program, which ends when its driver answers."""
    write_program("nvidia-smi", "NVIDIA H200")
    killed: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(local_hardware, "_TIMEOUT_S", 0)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: killed.append(process))
    monkeypatch.setattr(subprocess.Popen, "wait", lambda *_, **__: pytest.fail("it waits"))
    assert choose_local_hardware() == "cpu"
    monkeypatch.undo()
    (process,) = killed
    process.communicate()


def test_a_gpu_that_is_not_used(write_program, monkeypatch) -> None:
    write_program("nvidia-smi", "NVIDIA H200")
    for value in ("", "-1"):
        with monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", value)
            assert choose_local_hardware() == "cpu"
    monkeypatch.setattr(sys, "argv", ["hlat.train", "engine.device=cpu"])
    assert choose_local_hardware() == "cpu"


@pytest.mark.slow
def test_the_default_has_the_detected_gpu_and_its_precision(write_program) -> None:
    """Keep the number of processes open, and the choices of the command line."""
    write_program("nvidia-smi", "NVIDIA H200")
    found = compose_config([])
    assert (found.hardware.name, found.hardware.processes_per_node) == ("h200", None)
    assert found.precision.name == "mixed"
    assert compose_config(["precision=fp32"]).precision.name == "fp32"
    assert compose_config(["hardware=cpu"]).hardware.name == "cpu"
    assert compose_config(["experiment=hlat_7b"]).hardware.name == "trn1.32xlarge"
