"""Provenance of a run: code revision, packages and host.

The uncommitted changes are recorded with the revision, as research code is rarely committed before
a run. A code archive for a job contains both in revision.json.
"""

import functools
import hashlib
import json
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from hlat import __version__
from hlat.tracking import prediction_file

_PACKAGE_DIR = Path(__file__).resolve().parent.parent
REVISION_FILE = "revision.json"
"""File next to the package in a code archive."""


def collect_provenance(device: str, data: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return code revision and diff, packages, device, host, data fingerprint and prediction."""
    return {
        **_get_code_revision(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "hosts": [socket.gethostname()],
        "device": device,
        "data": data,
        **prediction_file.build_prediction_provenance(run_dir),
        "packages": dict(_list_packages()),
    }


@functools.cache
def _list_packages() -> list[tuple[str, str]]:
    """Return name and version of the installed packages, in the order of the names."""
    named = map(_read_name_and_version, metadata.distributions())
    return sorted(named, key=lambda package: package[0].lower())


def _read_name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    """Return name and version; `distribution.metadata` would parse the description too."""
    files = ("METADATA", "PKG-INFO", "")
    text = next(filter(None, map(distribution.read_text, files)), "")
    lines = reversed(text.partition("\n\n")[0].split("\n"))  # of two equal keys, the first counts
    headers = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return str(headers.get("Name")), str(headers.get("Version"))


def get_git_revision() -> str | None:
    """Return the git revision of the code; None without git or a checkout."""
    return _get_code_revision()["git_revision"]


def compute_code_digest() -> str:
    """Return a digest of the code: revision and uncommitted changes, or version without git."""
    revision = _get_code_revision()
    text = json.dumps(revision if revision["git_revision"] else __version__, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def format_revision() -> str:
    """Return the content of the revision file: code revision and diff."""
    return json.dumps(_get_code_revision(), indent=2) + "\n"


def _get_code_revision() -> dict[str, str | None]:
    revision_file = _PACKAGE_DIR.parent / REVISION_FILE
    if revision_file.exists():
        revision: dict[str, str | None] = json.loads(revision_file.read_text())
        return revision
    return {"git_revision": _run_git("rev-parse", "HEAD"), "git_diff": _run_git("diff", "HEAD")}


def _run_git(*arguments: str) -> str | None:
    """Return the output of git in this package's checkout; None without git or a checkout."""
    if not (_PACKAGE_DIR.parent / ".git").exists():
        return None
    command = ["git", "-C", str(_PACKAGE_DIR.parent), *arguments]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
