"""Where the two torchtitans lie: they share a package name, so neither is in the environment."""

import os
import sys
from pathlib import Path


def use_torchtitan(version: str) -> None:
    """Put PEERS/torchtitan-<version> on the import path; see requirements.txt for making it."""
    folder = Path(os.environ.get("PEERS", "peers")) / f"torchtitan-{version}"
    if not folder.is_dir():
        raise NotImplementedError(f"{folder} is missing; see requirements.txt")
    sys.path.insert(0, str(folder))
