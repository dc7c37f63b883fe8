"""Run the cells of the example notebook, and compare its recorded outputs with their kind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.document_commands import REPOSITORY

NOTEBOOK = REPOSITORY / "docs/notebooks/runs.ipynb"


@pytest.mark.slow  # 30 s: trains four small runs
def test_cells_run_in_order(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    script = "\n\n".join("".join(cell["source"]) for cell in code)
    (tmp_path / "cells.py").write_text(f"{script}\nprint(result.verdicts)\n")
    environment = {"PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    verdict = "the seeds do not decide between optimizer.lr=0.003 and optimizer.lr=0.001"
    assert verdict in done.stdout
