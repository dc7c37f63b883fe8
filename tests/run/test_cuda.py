"""A run on a device that is killed resumes with the results of an uninterrupted run."""

import signal

import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("recipe", ["fp32", "bf16_sr"])
def test_resume_after_sigkill_is_bit_identical(runner, device, recipe) -> None:
    overrides = (f"engine.device={device}", f"precision={recipe}", "run.repeat=true")
    done = runner.run("run.name=whole", *overrides)
    assert done.returncode == 0, done.stderr
    killed = runner.run_until(12, signal.SIGKILL, "run.name=x", *overrides)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = runner.run("run.name=x", *overrides)
    assert again.returncode == 0, again.stderr
    assert runner.losses("x") == runner.losses("whole")
    assert runner.weights("x", 20) == runner.weights("whole", 20)
