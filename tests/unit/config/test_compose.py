"""Composition from a checkout that is not installed."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = """
from hlat.config.compose import compose_config
print(compose_config(["model=tiny"], return_hydra_config=True).hydra.launcher._target_)
"""


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
