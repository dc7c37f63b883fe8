"""Every study composes into as many runs as it says, each of which can run and none of which is
another."""

import itertools
import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hlat.config.folders import folder
from hlat.config.resolve import resolve
from hlat.model.canonical import num_parameters

STUDIES = sorted(folder("sweeps").glob("*.yaml"), key=lambda file: file.stem)
README = (folder("sweeps") / "README.md").read_text()
POINTS = {"beta2": 4, "init": 9, "precision": 15, "weight_decay": 6}


def points(study):
    """The overrides of each point, as Hydra's own sweeper takes them apart."""
    axes = OmegaConf.load(study).hydra.sweeper.params
    parsed = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in axes.items()])
    values = [list(axis.sweep_string_iterator()) for axis in parsed]
    keys = [axis.key_or_group for axis in parsed]
    for point in itertools.product(*values):
        yield [f"{key}={value}" for key, value in zip(keys, point, strict=True)]


@pytest.mark.parametrize("study", STUDIES, ids=lambda file: file.stem)
def test_a_study_has_the_points_that_it_tells(study, compose):
    runs = [resolve(compose(f"+sweep={study.stem}", *point)) for point in points(study)]
    assert len(runs) == POINTS[study.stem]
    assert len({config.run.name for config in runs}) == len(runs)
    assert f"# Cost: {len(runs)} runs" in study.read_text()
    for config in runs:
        assert 1e6 < num_parameters(config.model) < 1e7


@pytest.mark.parametrize("study", STUDIES, ids=lambda file: file.stem)
def test_a_study_begins_with_question_answer_and_cost_and_is_listed(study):
    text = study.read_text()
    told = [text.index(f"# {word}") for word in ("Question:", "The paper's answer", "Cost:")]
    assert told == sorted(told)
    assert re.search(rf"^\| \[{study.stem}\]\({study.name}\) \|", README, re.MULTILINE)


def test_precision_runs_every_recipe(compose):
    recipes = {
        resolve(compose("+sweep=precision", *point)).precision.name
        for point in points(folder("sweeps") / "precision.yaml")
    }
    assert recipes == {file.stem for file in (folder("conf") / "precision").glob("*.yaml")}
