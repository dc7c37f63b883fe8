"""Finished runs of a root by their identity: settings, code and data.

A run that another user of a shared root has finished is not trained again. Each finished run adds
one small file, so that a run finds an equal one without reading the others. The file only points to
a run directory: without it, the run is trained again, and a run that was removed is not found.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from hlat.config.run import Config
from hlat.storage.bounded_files import load_json
from hlat.storage.durable_files import replace_file
from hlat.tracking import provenance
from hlat.tracking.jsonl_log import open_events_log
from hlat.tracking.lost_work import END_EVENTS
from hlat.tracking.run_directory import build_run_dir

_DIRECTORY = ".finished"
"""Directory in the root with one file per settings and code."""
_OTHER_GROUPS = ("tracking", "study")
"""Groups of settings without effect on the result."""
_OTHER_RUN_KEYS = ("name", "root", "force", "repeat")


def build_identity(run_dir: Path, config: Config, data: Mapping[str, Any]) -> dict[str, str] | None:
    """Return digests of settings, code and data; None if earlier attempts of the run had others."""
    earlier = _read_json(run_dir / "provenance.json")
    identity = {
        "config": _compute_config_digest(config),
        "code": provenance.compute_code_digest(),
        "data": _compute_digest(data),
    }
    return identity if earlier is None or earlier.get("identity") == identity else None


def record_finished_run(config: Config) -> None:
    """Record a finished run by the identity in its provenance, if the root is writable."""
    run_dir, root = build_run_dir(config.run), Path(config.run.root)
    identity = (_read_json(run_dir / "provenance.json") or {}).get("identity")
    if not isinstance(identity, dict):
        return
    with suppress(OSError):
        file = _get_file(root, identity)
        for directory in (file.parent.parent, file.parent):
            directory.mkdir(exist_ok=True)
            with suppress(OSError):  # the directory belongs to another user
                os.chmod(directory, root.stat().st_mode & 0o7777)
        content = {"run": config.run.name, "data": identity["data"]}
        replace_file(file, json.dumps(content).encode())


def print_finished_run(config: Config) -> bool:
    """Return True, and print the run, if another one has finished with the same identity."""
    run_dir = None if config.run.repeat else _find_finished_run(config)
    if run_dir is not None:
        print(
            f"nothing to do: {run_dir} has finished with the same settings, code and data; "
            "run.repeat=true trains it again"
        )
    return run_dir is not None


def _find_finished_run(config: Config) -> Path | None:
    own_dir = build_run_dir(config.run)
    has_started = os.path.exists(open_events_log(own_dir).path)  # False if it is not readable
    if has_started and os.access(own_dir, os.W_OK):
        return None  # it is resumed, unless it belongs to another user
    root, config_digest = Path(config.run.root), _compute_config_digest(config)
    if not (root / _DIRECTORY / config_digest).is_dir():
        return None  # without calling git
    identity = {"config": config_digest, "code": provenance.compute_code_digest()}
    recorded = _read_json(_get_file(root, identity))
    if recorded is None or not isinstance(recorded.get("run"), str):
        return None
    run_dir = root / recorded["run"]
    if ".." in run_dir.parts or not run_dir.is_relative_to(root):
        return None
    if not _is_finished(run_dir, identity):
        return None
    from hlat.data.training_data import open_training_data

    data = open_training_data(config.data, config.phase, config.batch, config.run.seed)
    return run_dir if recorded.get("data") == _compute_digest(data.fingerprint) else None


def _is_finished(run_dir: Path, identity: Mapping[str, str]) -> bool:
    found = (_read_json(run_dir / "provenance.json") or {}).get("identity")
    if not isinstance(found, dict) or any(found.get(key) != identity[key] for key in identity):
        return False
    ends = [row["event"] for row in open_events_log(run_dir).read_rows()]
    return [event for event in ends if event in END_EVENTS][-1:] == ["finish"]


def _get_file(root: Path, identity: Mapping[str, str]) -> Path:
    return root / _DIRECTORY / identity["config"] / f"{identity['code']}.json"


def _compute_config_digest(config: Config) -> str:
    settings = dataclasses.asdict(config)
    for group in _OTHER_GROUPS:
        settings.pop(group, None)
    for key in _OTHER_RUN_KEYS:
        settings["run"].pop(key, None)
    return _compute_digest(settings)


def _compute_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=attrgetter("value"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        content = load_json(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
