"""Arguments of Slurm's commands, and parsers of their output, with fake programs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.jobs import slurm_commands

REJECTION = "sbatch: unrecognized option '--foo=1'"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that installs a program with the given shell commands."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def install_program(name: str, commands: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / name).chmod(0o755)

    return install_program


def test_format_and_parse_arrays():
    assert slurm_commands.format_array([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert slurm_commands.format_array([4], 2) == "4%2"
    assert slurm_commands.parse_array_limit("#!/bin/sh\n#SBATCH --array=0-2,5%12\n") == 12
    assert slurm_commands.parse_array_limit("#SBATCH --array=0-2\necho --array=1%3") is None


@pytest.mark.parametrize(
    ("answer", "job_id"),
    [("7", "7"), ("7;cluster", "7"), ("Submitted batch job 7", None), ("", None)],
)
def test_parse_the_job_id_of_sbatch(install, answer, job_id):
    install("sbatch", f"echo '{answer}'")
    if job_id is not None:
        assert slurm_commands.submit_script(Path("x.sh")) == job_id
        return
    with pytest.raises(
        slurm_commands.UnknownJobError, match=r"in place of a job id; .*x\.sh with sq"
    ):
        slurm_commands.submit_script(Path("x.sh"))


def test_a_submission_without_an_answer_may_have_a_job(install, monkeypatch):
    install("sbatch", "exec sleep 30")
    monkeypatch.setattr(slurm_commands, "_TIMEOUT_S", 0.2)
    with pytest.raises(slurm_commands.UnknownJobError, match=r"not answered .*; look for the job"):
        slurm_commands.submit_script(Path("x.sh"))


def test_name_the_option_that_sbatch_rejects(install):
    lines = f'"{REJECTION}" \'Try "sbatch --help" for more\''
    install("sbatch", f"printf '%s\\n' {lines} >&2\nexit 1")
    assert slurm_commands.find_rejection_reason("") == REJECTION
    with pytest.raises(ConfigError, match=r"sbatch rejects x\.sh: sbatch: unrec") as rejected:
        slurm_commands.submit_script(Path("x.sh"))
    assert not isinstance(rejected.value, slurm_commands.UnknownJobError)


def test_reject_incomplete_rows_of_squeue(install):
    install("squeue", "echo '7|RUNNING'; echo '8|PENDING||Priority'")
    assert slurm_commands.query_job_states(["8"])["8"].reason == "Priority"
    with pytest.raises(ConfigError, match=r"squeue printed 7\|RUNNING in place of"):
        slurm_commands.query_job_states(["7"])
