"""The settings with which a finished run is extended, and what a start from it allows."""

import dataclasses

import pytest

from hlat.config.resolve import resolve_config
from hlat.training_state import (
    TrainingState,
    build_last_state,
    compute_extension,
    find_start_problems,
)

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


def test_start_problems_by_what_a_checkpoint_contains(compose):
    """A campaign compares two configurations, and a run its own one with a checkpoint."""

    def find(*overrides: str, saved: TrainingState | None = None, same: bool = False) -> list[str]:
        config = resolve_config(compose("run.steps=20", *overrides))
        return find_start_problems(config, saved or before, "PATH", same)

    before = build_last_state(resolve_config(compose("run.steps=10")))
    assert find() == find("optimizer.lr=1") == find("run.steps=10", same=True) == []
    imported = dataclasses.replace(before, fixed=before.fixed | {"model.init_from": "x"})
    assert find(saved=imported) == []
    assert "model.init_from was x, is None" in find(saved=imported, same=True)[0]
    (problem,) = find("run.steps=10")
    assert problem.startswith("it has step 10, and the run ends at step 10; increase run.steps")
    changed = ("batch.sequence_length=32", "batch.global_batch_size=4", "run.seed=3")
    assert [line.partition(":")[0] for line in find(*changed)] == [
        "batch.global_batch_size",
        "batch.sequence_length",
        "run.seed",
    ]
    accepted = "data.allow_changed=[run.seed,batch.sequence_length]"
    assert len(find(*changed, accepted)) == 2, "never the batch"
    (problem,) = find("~data.sources.code")
    assert problem.startswith("data.sources.code: the checkpoint was written with a source, this")
    (problem,) = find("model.hidden_size=64")
    assert "model.hidden_size was 128, is 64; set it back" in problem
    (problem,) = find(saved=dataclasses.replace(before, weights_only=True))
    assert "hlat export PATH output=DIR, then model.init_from=DIR" in problem


def test_hashes_of_files_are_not_compared_before_they_are_opened(compose):
    config = resolve_config(compose("run.steps=10"))
    saved = build_last_state(config)
    hashes = {"data.tokenizer": "sha", "data.sources.code": {"rows": 3}}
    saved.data["fingerprint"].update(hashes)
    assert find_start_problems(config, saved, "PATH", is_same_run=True) == []
