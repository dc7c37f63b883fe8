"""Composition from a checkout that is not installed."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = """
from hlat.config.compose import compose_config
print(compose_config(["model=tiny"], return_hydra_config=True).hydra.launcher._target_)
"""


@pytest.mark.slow
def test_launchers_of_a_checkout_that_is_not_installed() -> None:
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    finished = subprocess.run(
        [sys.executable, "-S", "-c", COMPOSE],  # without .pth files: no editable installation
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout.strip().endswith("LocalLauncher"), finished.stderr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "fp32"),
        (["hardware=h100_p5"], "mixed"),
        (["model=7b"], "bf16_sr"),
        (["model=7b", "hardware=trn1_32xl"], "bf16_sr"),
        (["model=7b", "hardware=h200_p5en"], "mixed"),
        (["model=7b", "hardware=h100_p5", "precision=bf16_sr"], "bf16_sr"),
        (["experiment=hlat_7b"], "bf16_sr"),
    ],
)
def test_default_precision_by_model_and_hardware(compose, overrides, expected) -> None:
    assert compose(*overrides).precision.name == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer=schedule_free"], "constant"),
        (["optimizer=schedule_free_tiny"], "constant"),
        (["optimizer=schedule_free", "schedule=wsd"], "wsd"),
        (["optimizer=schedule_free", "experiment=small_study"], "linear"),
    ],
)
def test_a_schedule_takes_precedence_over_that_of_the_optimizer(
    compose, overrides, expected
) -> None:
    config = compose(*overrides)
    assert (config.optimizer.name, config.schedule.name) == ("schedule_free", expected)
