"""The lock files pin what constraints.txt pins, with a hash of every file."""

import re
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LOCKS = ["requirements", "requirements-dev", "build", "tools"]
ENVIRONMENTS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": platform,
        "platform_system": platform.title(),
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    for python, (platform, machine) in product(
        ("3.10", "3.11", "3.12", "3.13"), (("linux", "x86_64"), ("darwin", "arm64"))
    )
]


def read_entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """Return each requirement of a lock file with its hashes."""
    text = (REPOSITORY / f"supply_chain/{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [
        (Requirement(line.split("--hash")[0]), re.findall(r"--hash=sha256:(\w+)", line))
        for line in lines
    ]


def select(requirements: list[Requirement], environment: dict[str, str]) -> dict[str, str]:
    """Return the version of each package in an environment."""
    return {
        canonicalize_name(one.name): str(one.specifier)
        for one in requirements
        if one.marker is None or one.marker.evaluate(environment)
    }


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_with_hashes(name: str) -> None:
    entries = read_entries(name)
    assert entries
    for requirement, hashes in entries:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert requirement.url is None
        assert hashes, requirement
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes), requirement


@pytest.mark.parametrize("name", ["requirements", "requirements-dev"])
def test_locks_and_constraints_have_the_same_versions(name: str) -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    constraints = [Requirement(line) for line in lines if not line.startswith("#")]
    locked = [requirement for requirement, _ in read_entries(name)]
    for environment in ENVIRONMENTS:
        pinned, expected = select(locked, environment), select(constraints, environment)
        shared = pinned.keys() & expected.keys()
        assert len(shared) > 30
        assert {one: pinned[one] for one in shared} == {one: expected[one] for one in shared}
        assert {"torch", "numpy", "pyarrow"} <= pinned.keys()


@pytest.mark.parametrize("name", ["requirements", "requirements-dev"])
def test_lock_has_all_installed_packages(name: str) -> None:
    """Follow the requirements of the installed packages recursively."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    extra = "dev" if name == "requirements-dev" else "signing"
    tables = re.findall(rf"^(?:dependencies|{extra}) = \[\n(.*?)^\]", text, re.M | re.S)
    waiting = [Requirement(line) for table in tables for line in re.findall(r'"(.+?)"', table)]
    locked = {canonicalize_name(requirement.name) for requirement, _ in read_entries(name)}
    needed: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name)
        if key in needed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        needed.add(key)
        waiting += map(Requirement, metadata.requires(key) or [])
    assert len(needed) > 40
    assert needed <= locked


def test_torch_is_that_of_pypi() -> None:
    """Require several hashes: PyPI has a wheel per Python and platform, a CPU build only one."""
    (hashes,) = [found for one, found in read_entries("requirements") if one.name == "torch"]
    assert len(hashes) >= 10
    names = {requirement.name for requirement, _ in read_entries("requirements")}
    assert {"nvidia-cublas", "triton"} <= names
