"""Campaign files: structure, names and dependencies."""

from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.jobs.campaign_file import find_campaign_file, list_campaigns, load_campaign

CHAIN = """
stages:
  last: {report: all}
  scores: {evaluate: mean, tasks: [piqa]}
  mean: {average: second, last: 2}
  second: {train: [], start_from: first}
  first: {train: [run.steps=3]}
"""


def load(tmp_path: Path, text: str):
    (tmp_path / "chain.yaml").write_text(text)
    return load_campaign(tmp_path / "chain.yaml")


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return [line.partition(": ")[2] for line in caught.value.problems]


def test_stages_are_sorted_by_their_dependencies(tmp_path: Path) -> None:
    campaign = load(tmp_path, CHAIN)
    assert [stage.name for stage in campaign.stages] == [
        "first",
        "second",
        "mean",
        "scores",
        "last",
    ]
    assert campaign.get_stage("last").sources == ("scores", "mean", "second", "first")
    assert campaign.directory == Path("runs/chain")


def test_a_misspelled_stage_or_key_is_reported_with_the_nearest_one(tmp_path: Path) -> None:
    text = "stages:\n  a: {train: []}\n  b: {evaluate: a, task: [piqa], tasks: [piqa]}\n"
    assert problems(tmp_path, text) == [
        "stages.b.task is not a key of evaluate stages; did you mean tasks?"
    ]
    text = "stages:\n  first: {train: []}\n  b: {average: frist, last: 2}\n"
    assert problems(tmp_path, text) == ["stages.b: frist is not a stage; did you mean first?"]
    assert problems(tmp_path, "stage:\n  a: {trian: []}\n") == [
        "stage is not a key of a campaign; did you mean stages?",
        "stages: give at least one stage by name",
    ]


def test_a_cycle_is_rejected(tmp_path: Path) -> None:
    text = "stages:\n  a: {train: [], after: [b]}\n  b: {train: [], start_from: a}\n"
    (line,) = problems(tmp_path, text)
    assert line.startswith("stages depend on each other: ")
    assert " -> " in line


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("{a: {train: [], average: b}}", "stages.a: give one of train, average, evaluate, report"),
        ("{jobs: {train: []}}", "stages.jobs: choose another name"),
        ("{a: {train: []}, b: {average: a}}", "give last, steps or tokens of two checkpoints"),
        ("{a: {train: []}, b: {average: a, last: 2, steps: [1, 2]}}", "give one of last and steps"),
        ("{a: {train: []}, b: {evaluate: a}}", "stages.b: give tasks"),
        ("{a: {report: all}, b: {start_from: a, train: []}}", "a trains no model"),
        (
            "{a: {train: []}, b: {train: [], start_from: a, at_step: 2, at_tokens: 9}}",
            "stages.b: give one of at_step and at_tokens",
        ),
        (
            "{a: {train: [], at_step: 2}}",
            "stages.a.at_step selects a checkpoint of the stage in stages.a.start",
        ),
        (
            "{a: {train: []}, b: {train: [], start_from: a, steps: [2]}}",
            "stages.b.steps is not a key of train stages; did you mean at_step?",
        ),
        ("{a: {train: x}}", "stages.a.train: x is not a list of strings"),
        (
            "{a: {train: []}, b: {evaluate: a, tasks: [x/t.yaml]}}",
            "stages.b.tasks: x/t.yaml is a file",
        ),
        ("{a: {train: []}, b: {evaluate: a, tasks: [t], steps: [0]}}", "0 is not a whole number"),
    ],
)
def test_invalid_stages_are_rejected(tmp_path: Path, stages: str, message: str) -> None:
    assert any(message in line for line in problems(tmp_path, f"stages: {stages}\n"))


def test_campaigns_of_the_package_are_valid_and_found_by_name() -> None:
    assert {"anneal_tiny", "hlat_tiny", "hlat_70b"} <= {*list_campaigns()}
    for name in list_campaigns():
        assert load_campaign(find_campaign_file(name)).name == name
    with pytest.raises(ConfigError, match=r"hlat_70 is not a campaign; did you mean hlat_70b\?"):
        find_campaign_file("hlat_70")


def test_a_list_that_sets_a_key_twice_is_rejected(tmp_path: Path) -> None:
    text = "train: [run.seed=1, run.seed=2]\nstages:\n  a: {train: [run.steps=3, run.steps=4]}\n"
    assert problems(tmp_path, text) == [
        "stages.a.train: run.steps is set 2 times: run.steps=3 and run.steps=4; keep one of them",
        "train: run.seed is set 2 times: run.seed=1 and run.seed=2; keep one of them",
    ]
