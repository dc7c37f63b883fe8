"""Read tasks with SkyPilot, and print the results as JSON.

    python tasks.py TASK.yaml...

Run in .venv-skypilot with a temporary home directory. SkyPilot would download its catalog of
instance types; one with the types of the recorded tasks is written instead.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import yaml

TYPES = ("p5.48xlarge", "p5en.48xlarge", "trn2.48xlarge")
COLUMNS = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,"
    "Region,AvailabilityZone,Arch"
)


def write_catalog(home: Path) -> None:
    """Write the catalog that SkyPilot would download, with few types."""
    folder = home / ".sky/catalogs/v8/aws"
    folder.mkdir(parents=True)
    rows = [f"{name},,,192,2048,,1,1,us-east-2,us-east-2a,x86_64" for name in TYPES]
    (folder / "vms.csv").write_text("\n".join((COLUMNS, *rows)) + "\n")


def read_task(text: str) -> dict[str, object]:
    """Return the task that SkyPilot read, or the error."""
    import sky

    plain = yaml.safe_load(text)
    if "workdir" in plain:
        plain["workdir"] = os.environ["HOME"]
    try:
        secrets = [(name, "x") for name in plain.get("secrets", {})]
        task = sky.Task.from_yaml_config(plain, secrets_overrides=secrets)
        (resources,) = task.resources
        resources.validate()
    except Exception as error:  # SkyPilot has no class for these errors
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "nodes": task.num_nodes,
        "instance_type": resources.instance_type,
        "network_tier": resources.network_tier and resources.network_tier.value,
        "recovery": resources.job_recovery,
        "mounts": [*(task.file_mounts or {}), *task.storage_mounts, *(task.volumes or {})],
    }


if __name__ == "__main__":
    texts = [Path(file).read_text() for file in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        write_catalog(Path(home))
        print(json.dumps([read_task(text) for text in texts]))
