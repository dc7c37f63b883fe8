"""Submission of a prepared job if the answer of sbatch contains no job id."""

from typing import Any
from unittest import mock

import pytest

from hlat.config.compose import import_launcher_module
from hlat.config.config_errors import ConfigError


def test_submit_once_without_a_job_id() -> None:
    submitit_utils: Any = pytest.importorskip("submitit.core.utils", reason="needs submitit")
    executor = mock.MagicMock(parameters={"additional_parameters": {}})
    executor._submit_command.side_effect = submitit_utils.FailedSubmissionError("output ''")
    module: Any = import_launcher_module("slurm._prepared_job")
    job = module.PreparedJob([mock.Mock(), mock.Mock()], None, executor, "x", mock.Mock(), None)
    with pytest.raises(
        ConfigError, match=r"sbatch printed no job id .* before you submit it again"
    ):
        job.submit()
    assert executor._submit_command.call_count == 1
