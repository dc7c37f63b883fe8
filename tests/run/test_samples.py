"""Samples that a model generates during training."""

import json

import pytest

from hlat.inference import generate
from tests.run.conftest import Runner, call_command

PROMPTS = r'evaluation.samples.prompts=["def main(", "<b>The", ""]'


@pytest.mark.slow
def test_samples_are_recorded_without_changing_the_losses(
    runner: Runner, uninterrupted: Runner
) -> None:
    overrides = (PROMPTS, "evaluation.samples.max_tokens=8", "evaluation.samples.temperature=0")
    done = runner.run("run.name=x", "evaluation.every_steps=10", "tracking=tensorboard", *overrides)
    assert done.returncode == 0, done.stderr
    rows = [row for row in runner.rows("x", "events.jsonl") if row["event"] == "samples"]
    assert [row["step"] for row in rows] == [0, 10, 20]
    assert [sample["prompt"] for sample in rows[-1]["texts"]] == ["def main(", "<b>The", ""]
    assert f'step 20: "def main(" -> {json.dumps(rows[-1]["texts"][0]["text"])}' in done.stdout
    assert rows[0]["texts"] != rows[-1]["texts"]
    losses = [row["loss"] for row in runner.rows("x", "metrics.jsonl")]
    assert losses == [row["loss"] for row in uninterrupted.rows("whole", "metrics.jsonl")]
    page = (runner.folder / "runs/x/report.html").read_text()
    assert "<h2>Samples</h2>" in page
    assert "&lt;b&gt;The" in page
    shown = call_command(
        generate.main, runner.folder, "runs/x", "def main(", "temperature=0", "max_tokens=8"
    )
    assert shown.out == f"def main({rows[-1]['texts'][0]['text']}\n"


def test_a_prompt_that_is_too_long_is_refused_before_training(runner: Runner, refused) -> None:
    done = runner.run("run.name=x", PROMPTS)
    refused(done, "evaluation.samples.max_tokens=64 and a prompt of ")


@pytest.mark.slow  # composes a run
def test_samples_are_refused_with_zero_3(runner: Runner) -> None:
    done = runner.run("run.name=x", PROMPTS, "parallelism.zero=3")
    assert done.returncode == 2
    assert (
        "evaluation.samples.prompts with parallelism.zero=3 is not supported by engine=native"
        in done.stderr
    )
