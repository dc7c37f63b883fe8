"""A run folder for the tests of the reporting room."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_folders import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 50 steps."""
    return make_run(tmp_path / "tiny-7f3a")
