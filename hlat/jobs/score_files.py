"""Scores of evaluations that run as jobs."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def load_all_scores(scores_dir: Path) -> list[dict[str, Any]]:
    """Return the content of all scores files, sorted by modification time."""
    rows = []
    for file in sorted(scores_dir.glob("*.json"), key=lambda file: file.stat().st_mtime):
        with suppress(ValueError):  # the evaluation reports invalid files
            row = json.loads(file.read_text())
            if isinstance(row, dict) and {"scores", "tasks"} <= row.keys():
                rows.append(row)
    return rows
