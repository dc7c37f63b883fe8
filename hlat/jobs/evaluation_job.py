"""Evaluations as jobs of a launcher."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.run import Config
from hlat.tracking.run_directory import EVALUATIONS_DIR


@dataclass(frozen=True)
class EvaluationJob:
    """Evaluation as a job of a launcher.

    `name` is a deterministic name of the tasks and the model, `base_dir` the directory with the
    subdirectory `evaluations` of the scores and job files, `arguments` those of `hlat evaluate`.
    """

    name: str
    model: str
    base_dir: Path
    arguments: tuple[str, ...]
    config: Config

    @property
    def scores_dir(self) -> Path:
        """Directory of the scores."""
        return self.base_dir / EVALUATIONS_DIR

    @property
    def job_dir(self) -> Path:
        """Directory of the submissions, as the run directory of a run."""
        return self.scores_dir / self.name

    @property
    def job_name(self) -> str:
        """Job name for the scheduler."""
        return f"{Path(self.model).name}.{self.name}"


def load_all_scores(scores_dir: Path) -> list[dict[str, Any]]:
    """Return the content of all scores files, sorted by modification time."""
    rows = []
    for file in sorted(scores_dir.glob("*.json"), key=lambda file: file.stat().st_mtime):
        with suppress(ValueError):  # the evaluation reports invalid files
            row = json.loads(file.read_text())
            if isinstance(row, dict) and {"scores", "tasks"} <= row.keys():
                rows.append(row)
    return rows
