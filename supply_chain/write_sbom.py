"""Write a CycloneDX SBOM of an environment that contains hlat: `make sbom`.

cyclonedx-py lists the installed packages. This script adds the licences that it does not recognize,
makes hlat the subject, and validates the result with the schema of the library. Run it in
`.venv-supply-chain`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

PROJECT = "hlat"
LIST_LICENSES = """
import json
from importlib.metadata import distributions
found = {one.metadata["Name"]: one.metadata.get("License", "") for one in distributions()}
print(json.dumps(found))
"""


def main() -> None:
    """Write the SBOM and print its name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="interpreter of the environment")
    parser.add_argument("directory", type=Path, help="directory to write hlat-<version>.cdx.json")
    arguments = parser.parse_args()
    sbom = complete_sbom(list_components(arguments.python), read_licenses(arguments.python))
    content = json.dumps(sbom, indent=2)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(content):
        sys.exit(f"the SBOM does not match the schema of CycloneDX 1.6: {error}")
    version = sbom["metadata"]["component"]["version"]
    arguments.directory.mkdir(exist_ok=True)
    output = arguments.directory / f"{PROJECT}-{version}.cdx.json"
    output.write_text(content)
    print(f"{output}: {len(sbom['components'])} packages")


def list_components(python: str) -> dict[str, Any]:
    """Return the SBOM that cyclonedx-py writes for the environment."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--sv", "1.6"]
    command += ["--output-reproducible", python]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def read_licenses(python: str) -> dict[str, str]:
    """Return the field License of every installed package."""
    command = [python, "-c", LIST_LICENSES]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def complete_sbom(sbom: dict[str, Any], licenses: dict[str, str]) -> dict[str, Any]:
    """Return the SBOM with hlat as its subject, without its local path, and missing licences."""
    edges = {edge["ref"]: edge.get("dependsOn") for edge in sbom["dependencies"]}
    components = {component["name"]: component for component in sbom["components"]}
    del components[PROJECT]
    # A checkout on the path has further metadata (hlat.egg-info), without the dependencies
    found = [component for component in sbom["components"] if component["name"] == PROJECT]
    own = next((one for one in found if edges.get(one["bom-ref"])), found[0])
    others = {one["bom-ref"] for one in found if one is not own}
    sbom["dependencies"] = [edge for edge in sbom["dependencies"] if edge["ref"] not in others]
    own.pop("externalReferences", None)
    sbom["metadata"]["component"] = own | {"type": "application"}
    sbom["components"] = list(components.values())
    for name, component in components.items():
        if not component.get("licenses") and (text := licenses.get(name)):
            license_ = {"name": text.splitlines()[0], "acknowledgement": "declared"}
            component["licenses"] = [{"license": license_}]
    return sbom


if __name__ == "__main__":
    main()
