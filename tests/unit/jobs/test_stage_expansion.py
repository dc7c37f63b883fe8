"""Expansion of stages to jobs, with their configurations."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.inference import inference_config
from hlat.jobs import stage_expansion
from hlat.jobs.campaign_cost import compute_costs
from hlat.jobs.campaign_file import load_campaign
from hlat.jobs.stage_expansion import ExpandedCampaign, expand_campaign

STAGES = """
train: [checkpoint.milestone_tokens=20480]
stages:
  first: {train: [run.steps=40]}
  second: {train: [run.steps=60], start_from: first}
  mean: {average: second, tokens: [102400, 122880]}
  scores: {evaluate: first, every_tokens: 40960, tasks: [piqa], limit: 3}
  final: {evaluate: mean, tasks: [piqa]}
"""


@pytest.fixture(autouse=True, scope="module")
def _compose_once() -> Iterator[None]:
    """Compose each configuration once: composition is most of the run time."""
    compose = functools.cache(lambda overrides: compose_config(overrides))
    with pytest.MonkeyPatch.context() as patch:
        for module in (stage_expansion, inference_config):
            patch.setattr(
                module, "compose_config", lambda overrides: copy.deepcopy(compose((*overrides,)))
            )
        yield


def expand(tmp_path: Path, *changes: tuple[str, str], stages: str = STAGES) -> ExpandedCampaign:
    text = stages
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "chain.yaml").write_text(text)
    return expand_campaign(load_campaign(tmp_path / "chain.yaml"))


def test_jobs_have_the_commands_of_their_stages(tmp_path: Path) -> None:
    jobs = {job.name: job for job in expand(tmp_path).jobs}
    assert [*jobs] == ["first", "second", "scores@20", "scores@40", "mean", "final"]
    run = "runs/chain/second"
    assert jobs["second"].arguments[-3:] == (
        "run.root=runs/chain",
        "run.name=second",
        "checkpoint.start_from=runs/chain/first/checkpoints/step_00000040",
    )
    assert jobs["mean"].arguments == (run, "steps=50,60", f"output={run}/averages/mean")
    assert jobs["scores@20"].arguments == ("runs/chain/first", "tasks=piqa", "limit=3", "step=20")
    assert jobs["final"].arguments == (f"{run}/averages/mean", "tasks=piqa")
    assert jobs["final"].after == ("mean",)


BRANCHES = """
stages:
  trunk:
    train: [schedule=constant, run.steps=40, checkpoint.every_steps=10, checkpoint.keep_every_steps=20]
  branch: {train: [run.steps=50], start_from: trunk, at_step: 20}
"""


@pytest.mark.parametrize(
    ("selection", "step"), [("at_step: 20", 20), ("at_tokens: 39_000", 20), ("at_step: 40", 40)]
)
def test_a_branch_starts_from_the_selected_checkpoint(
    tmp_path: Path, selection: str, step: int
) -> None:
    expanded = expand(tmp_path, ("at_step: 20", selection), stages=BRANCHES)
    trunk, branch = expanded.jobs
    path = f"runs/chain/trunk/checkpoints/step_{step:08}"
    assert branch.arguments[-1] == f"checkpoint.start_from={path}"
    assert (branch.after, branch.step) == (("trunk",), None)
    assert branch.detail == f"from step {step} of trunk to step 50 of tiny"
    (_, cost) = compute_costs(expanded)
    assert cost.num_steps == 50 - step
    assert trunk.digest != branch.digest


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        (
            "at_step: 30",
            "start_from=trunk, at_step=30: trunk does not keep its checkpoint of step 30: "
            "checkpoint.every_steps=10 and checkpoint.keep_every_steps=20 (milestones have no "
            "optimizer state); set both to a divisor of 30 in stages.trunk, or choose another "
            "at_step",
        ),
        (
            "at_tokens: 90_000",
            "start_from=trunk, at_tokens=90000: trunk has the steps 1 to 40 (81,920 tokens) and "
            "not 44; choose another at_tokens, or train trunk longer with run.steps and "
            "schedule.total_steps",
        ),
    ],
)
def test_a_branch_from_a_checkpoint_that_the_trunk_lacks_is_rejected(
    tmp_path: Path, selection: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(tmp_path, ("at_step: 20", selection), stages=BRANCHES)
    assert caught.value.problems == (f"stages.branch: {problem}",)


def test_a_stage_replaces_an_override_of_all_stages(tmp_path: Path) -> None:
    expanded = expand(tmp_path, ("[run.steps=60]", "[run.steps=60, checkpoint.milestone_tokens=4]"))
    (job,) = [job for job in expanded.jobs if job.name == "second"]
    given = [word for word in job.arguments if "milestone" in word]
    assert given == ["checkpoint.milestone_tokens=4"]


def test_a_stage_that_its_source_does_not_allow_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(tmp_path, ("[run.steps=60]", "[run.steps=60, batch.sequence_length=32]"))
    assert caught.value.problems == (
        "stages.second: start_from=first: batch.sequence_length: the checkpoint was written with "
        "256, this run has 32; restore the former, or start a new run",
    )


@pytest.mark.slow
def test_only_changed_stages_have_another_digest(tmp_path: Path) -> None:
    before = {job.name: job.digest for job in expand(tmp_path).jobs}
    changes = (("limit: 3", "limit: 4"), ("[run.steps=60]", "[run.steps=60, optimizer.lr=1e-4]"))
    after = {job.name: job.digest for job in expand(tmp_path, *changes).jobs}
    changed = {name for name, digest in before.items() if after[name] != digest}
    assert changed == {"second", "scores@20", "scores@40"}


def test_problems_of_all_stages_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(
            tmp_path,
            ("every_tokens: 40960", "tokens: [30000]"),
            ("[run.steps=60]", "[run.steps=60, optimizer.rl=1]"),
        )
    second, scores = caught.value.problems
    assert second.startswith("stages.second: optimizer.rl")
    assert scores.startswith("stages.scores: first does not keep its checkpoint of step 15 ")
    assert "set checkpoint.milestone_tokens" in scores


@pytest.mark.parametrize(
    ("old", "new", "overrides"),
    [
        ("[run.steps=60]", "[run.steps=30]", "it has step 40, and the run ends at step 30"),
        ("[run.steps=60]", "[model.num_layers=1]", "start_from=first: model.num_layers was"),
        ("[run.steps=60]", "[run.name=x]", "run.name=x: the campaign sets run.name"),
        ("[run.steps=60]", "[hydra/launcher=slurm]", "use launcher: for settings"),
        ("final: {", "again: {evaluate: mean, tasks: [piqa]}\n  final: {", "same command as again"),
        ("tokens: [102400, 122880]", "last: 9", "second keeps checkpoint.keep_last=3 checkpoints"),
        ("tokens: [102400, 122880]", "steps: [50, 99]", "step 99 is not a step of the run"),
    ],
)
def test_invalid_stages_are_rejected(tmp_path: Path, old: str, new: str, overrides: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(tmp_path, (old, new))
    assert any(overrides in problem for problem in caught.value.problems)


def test_dependencies_of_a_stage_are_listed_once_for_all_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    list_dependencies = stage_expansion._StageExpander._list_dependencies

    def list_(expander, stage):
        listed.append(stage.name)
        return list_dependencies(expander, stage)

    monkeypatch.setattr(stage_expansion._StageExpander, "_list_dependencies", list_)
    changes = ("final: {evaluate: mean", "page: {report: all}\n  final: {evaluate: mean")
    jobs = {job.name: job for job in expand(tmp_path, changes).jobs}
    assert sorted(listed) == ["final", "first", "mean", "page", "scores", "second"]
    assert jobs["scores@20"].after == jobs["scores@40"].after == ("first",)
    assert jobs["page"].after == tuple(name for name in jobs if name != "page")


def test_jobs_are_counted_once_for_the_costs_of_all_stages(tmp_path: Path) -> None:
    class Jobs(tuple):
        num_reads = 0

        def __iter__(self):
            Jobs.num_reads += 1
            return super().__iter__()

    expanded = expand(tmp_path)
    costs = compute_costs(replace(expanded, jobs=Jobs(expanded.jobs)))
    assert {cost.stage: cost.num_jobs for cost in costs}["scores"] == 2
    assert Jobs.num_reads == 1
