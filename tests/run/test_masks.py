"""Runs with document masks."""

import pytest

MASKS = ("data.document_mask=true", "data.loss_mask=true")


@pytest.mark.slow  # trains three runs
def test_train_with_masks_and_resume_bit_identically(runner, uninterrupted):
    whole = runner.run("run.name=masked", *MASKS)
    assert whole.returncode == 0, whole.stderr
    losses = dict(runner.losses("masked"))
    assert losses[20] < losses[1] - 0.5
    assert losses[20] != dict(uninterrupted.losses("whole"))[20]
    for steps in ("run.steps=7", "run.steps=20"):
        assert runner.run("run.name=parts", *MASKS, steps).returncode == 0
    assert dict(runner.losses("parts")) == losses


@pytest.mark.slow  # one or more whole processes
def test_report_a_change_of_masks_at_resume(runner_at_step_10, uninterrupted):
    runner = runner_at_step_10
    again = runner.run("run.name=x", *MASKS)
    assert again.returncode == 0, again.stderr
    for key in ("data.document_mask", "data.loss_mask"):
        assert f"{key} was False, is True" in again.stdout
    assert runner.losses("x")[:10] == uninterrupted.losses("whole")[:10]
    assert runner.losses("x")[10:] != uninterrupted.losses("whole")[10:]
