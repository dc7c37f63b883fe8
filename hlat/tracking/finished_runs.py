"""Finished runs of a root by their identity: settings, code and data.

A run that another user of a shared root has finished is not trained again. Each finished run adds
one small file, so that a run finds an equal one without reading the others. The file only points to
a run directory: without it, the run is trained again, and a run that was removed is not found.

A run that starts from a checkpoint has the SHA-256 of its manifest as a setting instead of its
path: the path may contain another checkpoint later (docs/adr/0074).
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from hlat.config import extensions
from hlat.config.run import Config
from hlat.storage.bounded_files import load_json
from hlat.storage.durable_files import replace_file
from hlat.tracking import lost_work, provenance
from hlat.tracking.jsonl_log import open_events_log
from hlat.tracking.run_directory import CAMPAIGN_FILE, build_run_dir

_DIRECTORY = ".finished"
"""Directory in the root with one file per settings and code."""
_OTHER_GROUPS = ("tracking", "profiler", "study")
"""Groups of settings without effect on the result."""
_OTHER_RUN_KEYS = ("name", "root", "force", "repeat")
START_DIGEST = "manifest_sha256"
"""Field of the event of an attempt: SHA-256 of the manifest of the checkpoint that it loaded."""


def build_identity(run_dir: Path, config: Config, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the provenance for this module.

    `identity` contains digests of settings, code, extensions and data; None if earlier attempts had
    others, or if the checkpoint from which the run started is unknown.
    """
    earlier = _read_json(run_dir / "provenance.json")
    start = get_start(run_dir)
    identity = {
        "config": _compute_config_digest(config, start.get(START_DIGEST)),
        "code": provenance.compute_code_digest(),
        **extensions.compute_hashes(config.extensions),
        "data": _compute_digest(data),
    }
    has_no_start = start["step"] == 0 if start else config.checkpoint.start_from is None
    is_known = START_DIGEST in start or has_no_start
    is_same = is_known and (earlier is None or earlier.get("identity") == identity)
    copied = {"copied_steps": steps} if (steps := get_copied_steps(run_dir)) else {}
    return {"identity": identity if is_same else None, **copied}


def record_finished_run(config: Config) -> None:
    """Record a finished run by the identity in its provenance, if the root is writable."""
    run_dir = build_run_dir(config.run)
    identity = (_read_json(run_dir / "provenance.json") or {}).get("identity")
    if not isinstance(identity, dict):
        return
    with suppress(OSError):
        for root in _list_index_roots(config):
            file = _get_file(root, identity)
            for directory in (file.parent.parent, file.parent):
                directory.mkdir(exist_ok=True)
                with suppress(OSError):  # the directory belongs to another user
                    os.chmod(directory, root.stat().st_mode & 0o7777)
            content = {"run": str(run_dir.relative_to(root)), "data": identity["data"]}
            replace_file(file, json.dumps(content).encode())


def get_start(run_dir: Path) -> dict[str, Any]:
    """Return the event of the start of the first attempt; empty for a run that has not started.

    `step` is its first step and, if it started from a checkpoint, `START_DIGEST` the SHA-256 of the
    manifest.
    """
    rows = open_events_log(run_dir).read_rows()
    return next((row for row in rows if row["event"] in lost_work.START_EVENTS), {})


def is_copy(run_dir: Path) -> bool:
    """Return True if a run was not trained, but copied from a finished run."""
    return "copy_of" in (_read_json(run_dir / "provenance.json") or {})


def get_copied_steps(run_dir: Path) -> int:
    """Return the steps that a run was not trained for, but copied with their checkpoints."""
    steps = (_read_json(run_dir / "provenance.json") or {}).get("copied_steps")
    return steps if isinstance(steps, int) else 0


def find_distinct(provenances: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the runs without copies of others, which are no further samples."""
    trained = [run.get("identity") for run in provenances if run.get("copy_of") is None]
    distinct = []
    for index, run in enumerate(provenances):
        if run.get("copy_of") is None:
            distinct.append(index)
        elif run.get("identity") not in trained:
            distinct.append(index)
            trained.append(run.get("identity"))
    return distinct


def build_copy_provenance(source: Path, num_steps: int) -> dict[str, Any]:
    """Return the provenance of a copy of a finished run."""
    recorded = _read_json(source / "provenance.json") or {}
    return {"copy_of": source.name, "copied_steps": num_steps, **recorded}


def find_finished_run(config: Config, start_digest: str | None = None) -> Path | None:
    """Return the directory of a finished run with the same settings, code and data, if any.

    None with `run.repeat`, for a run that has started, which is resumed, and for one that records
    profiles, which a copy would not have. `start_digest` is the SHA-256 of the manifest of the
    checkpoint from which a new run starts; None: unknown, or none.
    """
    if start_digest is None and config.checkpoint.start_from is not None:
        return None
    own_dir = build_run_dir(config.run)
    has_started = os.path.exists(open_events_log(own_dir).path)  # False if it is not readable
    is_resumable = has_started and os.access(own_dir, os.W_OK)  # not that of another user
    repeats = config.run.repeat or bool(config.profiler.steps)
    if repeats or (is_resumable and not is_copy(own_dir)):
        return None
    config_digest = _compute_config_digest(config, start_digest)
    for root in _list_index_roots(config):
        if not (root / _DIRECTORY / config_digest).is_dir():
            continue  # without calling git
        identity = {"config": config_digest, "code": provenance.compute_code_digest()}
        recorded = _read_json(_get_file(root, identity))
        if recorded is None or not isinstance(recorded.get("run"), str):
            continue
        run_dir: Path = root / recorded["run"]
        if ".." in run_dir.parts or not run_dir.is_relative_to(root):
            continue
        if not _is_finished(run_dir, identity):
            continue
        if is_resumable and not _is_finished(own_dir, identity):
            return None  # a copy of a run with other settings
        from hlat.data.training_data import open_training_data

        data = open_training_data(
            config.data, config.phase, config.batch, config.run.resolved_data_seed
        )
        if recorded.get("data") == _compute_digest(data.fingerprint):
            return run_dir
    return None


def _list_index_roots(config: Config) -> list[Path]:
    """Return the root of a run and, for a stage of a campaign, the root of all campaigns.

    With checkpoint.destination, stages of equal names in several campaigns have the same
    checkpoints directory, so that none can be a copy of another.
    """
    root = Path(config.run.root)
    is_stage = (root / CAMPAIGN_FILE).is_file() and config.checkpoint.destination is None
    return [root, root.parent] if is_stage else [root]


def _is_finished(run_dir: Path, identity: Mapping[str, str]) -> bool:
    found = (_read_json(run_dir / "provenance.json") or {}).get("identity")
    if not isinstance(found, dict) or any(found.get(key) != identity[key] for key in identity):
        return False
    return lost_work.is_finished(open_events_log(run_dir).read_rows())


def _get_file(root: Path, identity: Mapping[str, str]) -> Path:
    return root / _DIRECTORY / identity["config"] / f"{identity['code']}.json"


def _compute_config_digest(config: Config, start_digest: str | None) -> str:
    settings = dataclasses.asdict(config)
    settings["checkpoint"]["start_from"] = start_digest
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
