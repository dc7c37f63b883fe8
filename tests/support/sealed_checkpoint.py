"""Edited checkpoints with matching hashes."""

import hashlib
import json
from pathlib import Path


def seal_checkpoint(path: Path) -> None:
    """Recompute all hashes of a checkpoint after an edit."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name in manifest["files"]:
        content = (path / name).read_bytes()
        record = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][name] = record
    content = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(content)
    (path / "COMMITTED").write_text(hashlib.sha256(content).hexdigest())
