"""Installing hlat in an environment with torch never replaces torch, simulated with empty packages."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT_SCRIPT = (REPOSITORY / "launchers/parallelcluster/environment.sh").read_text()
PATTERN = re.search(r"^accelerator_packages='(.+?)'", ENVIRONMENT_SCRIPT, re.M)[1]  # type: ignore[index]
SDK = {
    "2.7": {"torch-neuronx": "2.7.0.2.12.22436", "torch": "2.7.1", "torch-xla": "2.7.0"},
    "2.8": {"torch-neuronx": "2.8.0.2.12.22436", "torch": "2.8.0", "torch-xla": "2.8.1"},
    "2.9": {"torch-neuronx": "2.9.0.2.12.22436", "torch": "2.9.0", "torch-xla": "2.9.0"},
}
"""Packages of SDK 2.28.1 by release of torch."""
COMMON = {"libneuronxla": "2.2.15515.0", "neuronx-cc": "2.23.6484.0", "numpy": "1.26.4"}


def build_metadata(name: str, version: str, requirements: list[str]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requirements)]) + "\n"


def write_wheel(folder: Path, name: str, version: str, requirements: list[str]) -> None:
    """Write a wheel without modules."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        "METADATA": build_metadata(name, version, requirements),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
        paths = [f"{stem}.dist-info/{file},," for file in (*files, "RECORD")]
        wheel.writestr(f"{stem}.dist-info/RECORD", "\n".join(paths))


def read_dependencies() -> list[str]:
    """Return the dependencies in pyproject.toml; Python 3.10 has no parser for it."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    section = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert section is not None
    return re.findall(r'^ *"(.+?)"', section[1], re.M)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write wheels of hlat, its dependencies, and torch of the Neuron SDKs and of PyPI."""
    folder = tmp_path_factory.mktemp("wheels")
    dependencies = read_dependencies()
    write_wheel(folder, "hlat", "0.1.0", dependencies)
    for dependency in map(Requirement, dependencies):
        (lowest,) = [one.version for one in dependency.specifier if one.operator == ">="]
        write_wheel(folder, dependency.name, lowest, [])
    for version in ("2.7.1", "2.8.0", "2.9.0", "2.15.0"):
        write_wheel(folder, "torch", version, [])
    return folder


def pip(environment: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    python = environment / "bin/python"
    command = [sys.executable, "-m", "pip", "--isolated", "--python", python, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def make_environment(folder: Path, release: str) -> Path:
    """Create an environment with the packages of an SDK."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    installed = SDK[release] | COMMON
    for name, version in installed.items():
        directory = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        directory.mkdir()
        needs = [f"torch=={release}.*"] if name in ("torch-neuronx", "torch-xla") else []
        (directory / "METADATA").write_text(build_metadata(name, version, needs))
        (directory / "INSTALLER").write_text("pip\n")
        (directory / "RECORD").touch()
    return folder


def dry_run(environment: Path, wheels: Path) -> tuple["subprocess.CompletedProcess[str]", dict]:
    """Return the result of a dry run, and the packages that it would install."""
    source, file = ("--no-index", "--find-links", str(wheels), "hlat"), environment / "report.json"
    done = pip(environment, "install", "--dry-run", "--report", str(file), *source)
    report = json.loads(file.read_text()) if file.exists() else {"install": []}
    items = [item["metadata"] for item in report["install"]]
    return done, {item["name"]: item["version"] for item in items}


@pytest.mark.parametrize(
    "release",
    [
        pytest.param("2.7", marks=pytest.mark.slow),  # the same result as with 2.8
        "2.8",
        "2.9",
    ],
)
@pytest.mark.slow
def test_torch_is_never_replaced(release: str, wheels: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment", release)
    listed = pip(environment, "list", "--format=freeze").stdout.splitlines()
    pins = [line for line in listed if re.search(PATTERN, line, re.I)]
    assert {*pins} == {f"{name}=={v}" for name, v in (SDK[release] | COMMON).items()}
    (tmp_path / "constraints.txt").write_text("\n".join(pins))
    configuration = f"[install]\nconstraint = {tmp_path}/constraints.txt\n"
    (environment / "pip.conf").write_text(configuration)
    done, installed = dry_run(environment, wheels)
    assert "torch" not in installed
    if release == "2.9":
        assert {"hlat", "hydra-core"} <= installed.keys(), done.stderr
        assert "numpy" not in installed
    else:
        assert done.returncode == 1
        assert f"torch=={SDK[release]['torch']}" in done.stdout + done.stderr


@pytest.mark.slow
def test_without_constraints_torch_would_be_replaced(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # without constraints of this machine
    environment = make_environment(tmp_path / "environment", "2.8")
    assert dry_run(environment, wheels)[1]["torch"] == "2.15.0"


def test_the_documentation_has_the_same_pattern() -> None:
    assert f"'{PATTERN}'" in (REPOSITORY / "docs/neuron.md").read_text()


def test_the_tested_pairs_are_the_oldest_and_newest_supported_versions() -> None:
    lines = (REPOSITORY / "tests/versions.txt").read_text().splitlines()
    pairs = [line.split() for line in lines if not line.startswith("#")]
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    (python,) = re.findall(r'^requires-python = "(.+)"', pyproject, re.M)
    (torch,) = (one for one in map(Requirement, read_dependencies()) if one.name == "torch")
    for specifier, versions in zip(
        (SpecifierSet(python), torch.specifier), zip(*pairs, strict=True), strict=True
    ):
        limits = {one.operator: Version(one.version) for one in specifier}
        newest = Version(versions[-1])
        assert limits == {
            ">=": Version(versions[0]),
            "<": Version(f"{newest.major}.{newest.minor + 1}"),
        }
