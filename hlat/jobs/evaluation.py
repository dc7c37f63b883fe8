"""An evaluation as launchers send it: a command that can be typed, and where its files belong."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.run import Config
from hlat.tracking.run_folder import EVALUATIONS


@dataclass(frozen=True)
class Evaluation:
    """What is asked of a model.

    Attributes:
        name: The same whenever the same is asked of the same model.
        model: What was named: a run, say.
        home: The folder in whose `evaluations` its scores are kept, and the files of the job too.
        words: What `python -m hlat.evaluate` is given to do it.
        config: The engine that is to answer.
    """

    name: str
    model: str
    home: Path
    words: tuple[str, ...]
    config: Config

    @property
    def scores(self) -> Path:
        """Where its scores are kept."""
        return self.home / EVALUATIONS

    @property
    def folder(self) -> Path:
        """Where the files of the job lie, as those of a run's do in the run's folder."""
        return self.scores / self.name

    @property
    def job_name(self) -> str:
        """What a scheduler calls the job."""
        return f"{Path(self.model).name}.{self.name}"


def scores(folder: Path) -> list[dict[str, Any]]:
    """What is known of each model in a folder of scores, in the order in which it was written."""
    found = []
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime):
        with suppress(ValueError):  # somebody else's; the evaluation itself says so
            row = json.loads(file.read_text())
            if isinstance(row, dict) and {"scores", "tasks"} <= row.keys():
                found.append(row)
    return found
