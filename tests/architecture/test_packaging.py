"""The package map names every folder, so that a wheel holds what a checkout holds."""

import configparser
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

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


def test_composing_and_help_import_no_heavy_library(tmp_path: Path) -> None:
    """Checked by an import hook, and by running where those libraries cannot be imported at all."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'pyarrow', 'tokenizers', 'matplotlib', 'numpy'}:\n"
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


def test_everything_that_gets_installed_is_pinned() -> None:
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
