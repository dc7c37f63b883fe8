"""File of a registered prediction, next to the directory of the run that it predicts.

The first attempt of the run records the digest of the file in its provenance, so that a later
change of the file is visible.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hlat.storage.bounded_files import load_json

DIGEST = "digest"
"""Field of the file: SHA-256 of all other fields."""
PROVENANCE_KEY = "prediction"
"""Field of the provenance with the digest of the file at the start of the run; null: no file."""
_MAX_BYTES = 2**20


def get_prediction_path(run_dir: Path) -> Path:
    """Return the file of the prediction of a run."""
    return run_dir.with_name(f"{run_dir.name}.prediction.json")


def load_prediction(run_dir: Path) -> dict[str, Any]:
    """Return the prediction of a run; empty if there is none, or if it cannot be read."""
    try:
        content = load_json(get_prediction_path(run_dir), _MAX_BYTES)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def compute_prediction_digest(prediction: Mapping[str, Any]) -> str:
    """Return the digest of all fields but `DIGEST`."""
    fields = {key: value for key, value in prediction.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def build_prediction_provenance(run_dir: Path) -> dict[str, str | None]:
    """Return the field of the provenance; later attempts have that of the first one."""
    try:
        earlier = load_json(run_dir / "provenance.json")
    except FileNotFoundError:
        prediction = load_prediction(run_dir)
        return {PROVENANCE_KEY: compute_prediction_digest(prediction) if prediction else None}
    except (OSError, ValueError):
        earlier = {}
    known = earlier.get(PROVENANCE_KEY) if isinstance(earlier, dict) else None
    return {PROVENANCE_KEY: known if isinstance(known, str) else None}
