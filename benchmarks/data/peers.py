"""Import path of the two torchtitan versions, which share a package name."""

import os
import sys
from pathlib import Path


def use_torchtitan(version: str) -> None:
    """Add PEERS/torchtitan-<version> to the import path (see requirements.txt)."""
    folder = Path(os.environ.get("PEERS", "peers")) / f"torchtitan-{version}"
    if not folder.is_dir():
        raise NotImplementedError(f"{folder} is missing; see requirements.txt")
    sys.path.insert(0, str(folder))
