"""Checkpoints that somebody has edited and whose hashes match."""

import hashlib
import json
from pathlib import Path


def seal_checkpoint(path: Path) -> None:
    """Compute all hashes of a checkpoint again, as whoever edits its files can."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name in manifest["files"]:
        content = (path / name).read_bytes()
        record = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][name] = record
    content = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(content)
    (path / "COMMITTED").write_text(hashlib.sha256(content).hexdigest())
