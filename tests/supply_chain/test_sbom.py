"""`make sbom` lists every runtime dependency with version and licence."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hlat

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TOOLS = REPOSITORY / ".venv-supply-chain/bin/python"


def list_runtime_dependencies() -> set[str]:
    text = (REPOSITORY / "pyproject.toml").read_text()
    (table,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    waiting, found = [Requirement(line) for line in re.findall(r'"(.+?)"', table)], set[str]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += map(Requirement, metadata.requires(name) or [])
    return found


@pytest.mark.slow  # cyclonedx-py reads the metadata of 160 packages: 15 s
def test_the_sbom_is_valid_and_complete(tmp_path: Path) -> None:
    if not TOOLS.exists():
        pytest.skip("no .venv-supply-chain; `make sbom` creates it")
    script = REPOSITORY / "supply_chain/write_sbom.py"
    subprocess.run([TOOLS, script, sys.executable, tmp_path], check=True)
    (path,) = tmp_path.iterdir()
    assert path.name == f"hlat-{hlat.__version__}.cdx.json"
    check = (
        "import sys; from cyclonedx.schema import SchemaVersion;"
        "from cyclonedx.validation.json import JsonStrictValidator;"
        "sys.exit(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))"
    )
    subprocess.run([TOOLS, "-c", check, path], check=True)
    text = path.read_text()
    sbom = json.loads(text)
    assert str(REPOSITORY) not in text
    root = sbom["metadata"]["component"]
    assert (root["name"], root["version"]) == ("hlat", hlat.__version__)
    components = {canonicalize_name(one["name"]): one for one in sbom["components"]}
    needed = list_runtime_dependencies()
    assert needed <= components.keys()
    for name in needed:
        assert components[name]["version"] == metadata.version(name)
        assert components[name]["licenses"], name
        assert components[name]["purl"].startswith("pkg:pypi/")
    (edges,) = [one for one in sbom["dependencies"] if one["ref"] == root["bom-ref"]]
    assert f"torch=={metadata.version('torch')}" in edges["dependsOn"]
