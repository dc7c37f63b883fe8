"""Output files of an evaluation."""

from pathlib import Path

import pytest

from hlat.evaluate import evaluator


def test_reject_outputs_before_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError):
        evaluator._validate_output(tmp_path)
    with pytest.raises((FileExistsError, NotADirectoryError)):
        evaluator._validate_output(tmp_path / "file/scores.json")
    evaluator._validate_output(tmp_path / "new/scores.json")
    assert (tmp_path / "new").is_dir()
