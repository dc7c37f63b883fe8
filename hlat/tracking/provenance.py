"""Where a run came from: code, packages, machine.

A result without its code revision cannot be repeated. The difference to the revision is kept too,
because research code is rarely committed when a run starts. A copy of the code that a job runs has
both in a file beside it.
"""

import json
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent
_REVISION = "revision.json"
"""In the folder of a copy."""


def collect(device: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return code revision and difference, packages, device, host, and data fingerprint."""
    return {
        **_code(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "hosts": [socket.gethostname()],
        "device": device,
        "data": data,
        "packages": _packages(),
    }


def revision() -> str | None:
    """Return the revision of the code; None without git or a checkout."""
    return _code()["git_revision"]


def leave_with(copy: Path) -> None:
    """Write revision and difference of the code beside a copy of it, in the folder `copy`."""
    (copy / _REVISION).write_text(json.dumps(_code(), indent=2) + "\n")


def _code() -> dict[str, str | None]:
    copied = _PACKAGE.parent / _REVISION
    if copied.exists():
        told: dict[str, str | None] = json.loads(copied.read_text())
        return told
    return {"git_revision": _git("rev-parse", "HEAD"), "git_diff": _git("diff", "HEAD")}


def _packages() -> dict[str, str]:
    told = [one.metadata for one in metadata.distributions()]  # each access parses a file
    told.sort(key=lambda one: str(one["Name"]).lower())
    return {one["Name"]: one["Version"] for one in told}


def _git(*arguments: str) -> str | None:
    """Return what git says of this package's checkout; None without git or a checkout."""
    if not (_PACKAGE.parent / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
