"""The package map names every directory, so that a wheel contains all files of a checkout."""

import configparser
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_the_map_names_every_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    named = set(setup["options"]["packages"].split())
    found = {
        ".".join(file.parent.relative_to(REPOSITORY).parts)
        for name in ("hlat", "launchers")
        for file in (REPOSITORY / name).rglob("__init__.py")
    }
    found = {name.replace("launchers", "hydra_plugins.hlat_launchers", 1) for name in found}
    assert named == found | {"hlat.campaigns", "hlat.conf", "hlat.sweeps"}


@pytest.mark.slow  # 8 s: imports every command
def test_composing_and_help_import_no_heavy_library(tmp_path: Path) -> None:
    """Checked by an import hook, and by running where those libraries cannot be imported at all."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        libraries = 'torch pyarrow tokenizers matplotlib numpy psutil'.split()\n"
        "        if name.split('.')[0] in libraries:\n"
        "            raise ImportError(f'{name} was imported while composing')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PATH": ""}
    for arguments in (
        ["--cfg", "job"],
        ["--help"],
        ["model=70b", "precision=mixed", "--cfg", "job"],
        ["--info", "plugins"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "hlat.train", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    refused = subprocess.run(
        [sys.executable, "-m", "hlat.train", "model=70b"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2, refused.stderr


def test_all_requirements_are_pinned() -> None:
    """Follow the requirements of the package and its development extra to the end."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    tables = re.findall(r"^(?:dependencies|dev) = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    waiting = [Requirement(line) for table in tables for line in re.findall(r'"(.+?)"', table)]
    assert len(waiting) > 10
    pins = (REPOSITORY / "constraints.txt").read_text()
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    needed: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in needed or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        needed.add(name)
        waiting += map(Requirement, metadata.requires(name) or [])
    assert needed - {"setuptools"} <= pinned


def test_an_editable_install_survives_a_checkout_in_the_working_directory(tmp_path: Path) -> None:
    """Import the package although the working directory contains hlat/ without __init__.py."""
    build = f"import build_backend; build_backend.build_editable({str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "supply_chain")}
    subprocess.run([sys.executable, "-c", build], cwd=REPOSITORY, env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site-packages")
    (tmp_path / "hlat").mkdir()
    (tmp_path / "hlat/README.md").touch()
    script = (
        "import site, sys\n"
        "sys.path = ['', *(path for path in sys.path if 'site-packages' not in path)]\n"
        f"site.addsitedir({str(tmp_path / 'site-packages')!r})\n"
        "import hlat.config.package_dirs\n"
        "print(hlat.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(REPOSITORY / "hlat/__init__.py"), done.stderr
