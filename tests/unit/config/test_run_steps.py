"""Settings with which a finished run is extended."""

import pytest

from hlat.config.resolve import resolve_config
from hlat.config.run_steps import compute_extension

TOKENS_OF_10_STEPS = "phase.timeline=[{name: only, tokens: 20480}]"


@pytest.mark.parametrize(
    ("overrides", "step", "expected"),
    [
        (["run.steps=3"], 3, {"run.steps": 6}),
        (["run.steps=200"], 200, {"run.steps": 256}),
        (["run.steps=30"], 60, {"run.steps": 120}),
        ([], 256, {"schedule.total_steps": 512}),
        (["run.steps=256"], 256, {"run.steps": 512, "schedule.total_steps": 512}),
        ([TOKENS_OF_10_STEPS], 10, {}),
        ([TOKENS_OF_10_STEPS, "run.steps=8"], 8, {"run.steps": 10}),
    ],
)
def test_extension_by_what_ended_the_run(compose, overrides, step, expected):
    assert compute_extension(resolve_config(compose(*overrides)), step) == expected
