"""The package has few top-level names, and the tests have the directories of the code."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
UNIT_TESTS = REPOSITORY / "tests/unit"
MAX_PACKAGES = 20
"""Limit of ADR 0065."""
TOP_MODULES = {"__init__", "__main__", "api", "average", "export", "precompile", "train"}
"""Modules outside of packages: the Python API, and what users start with `python -m hlat.X`."""
OTHER_TEST_DIRS = {"launchers", "benchmarks"}
"""Directories of tests/unit for code outside of hlat/. That of launchers has no subdirectories."""


def _find_test_dirs() -> dict[str, set[str]]:
    """Return, by name of a module without leading underscores, its directories below tests/unit."""
    found = defaultdict(set)
    for file in (REPOSITORY / "hlat").rglob("*.py"):
        found[file.stem.strip("_")].add(file.parent.relative_to(REPOSITORY / "hlat").as_posix())
    for file in (REPOSITORY / "launchers").rglob("*.py"):
        found[file.stem.strip("_")].add("launchers")
    return found


def _find_misplaced(tests: Iterable[Path], test_dirs: dict[str, set[str]]) -> list[str]:
    """Return a message for each test with the name of a module of another directory."""
    problems = []
    for test in tests:
        module, directory = test.stem.removeprefix("test_"), test.parent.as_posix()
        if directory not in test_dirs.get(module, {directory}):
            problems.append(f"tests/unit/{test} belongs in {', '.join(test_dirs[module])}/")
    return problems


def test_number_of_packages_is_limited() -> None:
    packages = [file.parent.name for file in (REPOSITORY / "hlat").glob("*/__init__.py")]
    assert len(packages) <= MAX_PACKAGES, f"merge one of {sorted(packages)} with another one"


def test_modules_outside_of_packages_are_entry_points() -> None:
    assert {file.stem for file in (REPOSITORY / "hlat").glob("*.py")} == TOP_MODULES


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("engine/test_device.py", ["tests/unit/engine/test_device.py belongs in engine/native/"]),
        ("engine/native/test_device.py", []),
        ("engine/test_speed.py", []),
    ],
)
def test_misplaced_tests_are_found(test: str, message: list[str]) -> None:
    assert _find_misplaced([Path(test)], {"device": {"engine/native"}}) == message


def test_unit_tests_are_in_the_directory_of_their_module() -> None:
    tests = [file.relative_to(UNIT_TESTS) for file in sorted(UNIT_TESTS.rglob("test_*.py"))]
    assert len(tests) > 200
    assert not _find_misplaced(tests, _find_test_dirs())


def test_every_directory_of_unit_tests_is_a_package() -> None:
    directories = {file.parent.relative_to(UNIT_TESTS) for file in UNIT_TESTS.rglob("*.py")}
    for directory in directories - {Path()}:
        is_package = (REPOSITORY / "hlat" / directory / "__init__.py").exists()
        assert is_package or directory.as_posix() in OTHER_TEST_DIRS, f"{directory} has no code"
