"""Environment with published schemas: `make test-schemas`."""

import shutil
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def schemas() -> Path:
    """Return the directory of the programs in the environment with the schemas."""
    programs = REPOSITORY / ".venv-schemas/bin"
    if not (programs / "python").exists():
        pytest.skip("no .venv-schemas; `make test-schemas` makes it")
    if shutil.which("node") is None:
        pytest.skip("no node on the PATH; ParallelCluster writes its templates with it")
    return programs
