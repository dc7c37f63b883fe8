"""Every study has the stated number of runs, which are valid and distinct."""

import copy
import functools
import importlib.util
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.sweep_axes import load_sweep_axes
from hlat.model.decoder_spec import count_parameters

STUDIES = sorted(find_package_dir("sweeps").glob("*.yaml"), key=lambda file: file.stem)
README = (find_package_dir("sweeps") / "README.md").read_text()
POINTS = {
    "averaging": 6,
    "batch_ramp": 20,
    "beta2": 240,
    "beta2_normuon": 12,
    "init": 144,
    "moe": 20,
    "optimizers": 35,
    "parallelism": 6,
    "precision": 240,
    "qk_norm": 96,
    "transfer_depth": 128,
    "transfer_width": 128,
    "tune_lr": 14,
    "tune_moe": 40,
    "tune_optimizers": 84,
    "upsampling": 6,
    "warmup": 96,
    "weight_decay": 96,
    "z_loss": 96,
}
GRIDS = [study for study in STUDIES if study.stem != "search"]
SMALLER = ("beta2", "init", "precision", "qk_norm", "warmup", "weight_decay", "z_loss")
NUM_PARAMETERS = dict.fromkeys(SMALLER, (5e5, 1e6)) | {
    "transfer_depth": (2e5, 1e6),
    "transfer_width": (2e5, 1e7),
}
"""Sizes of the models of studies over sizes; the others train a model of 1 to 10 M parameters."""
DEFAULT = {"beta2", "parallelism", "upsampling"}


def points(study):
    """Yield the overrides of each point, as parsed by Hydra's sweeper."""
    axes = OmegaConf.load(study).hydra.sweeper.params
    parsed = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in axes.items()])
    values = [list(axis.sweep_string_iterator()) for axis in parsed]
    keys = [axis.key_or_group for axis in parsed]
    grid = OmegaConf.select(OmegaConf.load(study), "study.lr_grid")
    if grid is not None:
        keys.append("optimizer.lr")
        values.append(load_sweep_axes([f"+sweep={study.stem}"]).axes["optimizer.lr"])
    for point in itertools.product(*values):
        yield [f"{key}={value}" for key, value in zip(keys, point, strict=True)]


def runs_of(study, compose):
    """Yield the configuration of each point, without invalid ones if the study prunes them."""
    prunes = OmegaConf.select(OmegaConf.load(study), "hydra.launcher.prune", default=False)
    for point in points(study):
        try:
            yield resolve_config(compose(f"+sweep={study.stem}", *point))
        except ConfigError:
            if not prunes:
                raise


@pytest.fixture(scope="module")
def load_runs(compose):
    """Return the configurations of a study, which are composed once."""
    return functools.cache(lambda study: [*runs_of(study, compose)])


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(study, marks=[] if study.stem in DEFAULT else [pytest.mark.slow])
        for study in GRIDS
    ],
    ids=lambda file: file.stem,
)
@pytest.mark.slow_after(1)
def test_study_has_the_stated_number_of_points(study, load_runs):
    runs = load_runs(study)
    assert len(runs) == POINTS[study.stem]
    assert len({config.run.name for config in runs}) == len(runs)
    assert f"# Cost: {len(runs)} runs" in study.read_text()
    for config in runs:
        assert config.tracking.wandb.group == study.stem
        low, high = NUM_PARAMETERS.get(study.stem, (1e6, 1e7))
        assert low < count_parameters(config.model) < high


@pytest.mark.parametrize("study", STUDIES, ids=lambda file: file.stem)
def test_study_begins_with_question_answer_and_cost(study):
    text = study.read_text()
    positions = [text.index(f"# {word}") for word in ("Question:", "The paper's answer", "Cost:")]
    assert positions == sorted(positions)
    assert re.search(rf"^\| \[{study.stem}\]\({study.name}\) \|", README, re.MULTILINE)


def test_search_states_its_trials_and_composes_at_its_bounds(compose):
    study = find_package_dir("sweeps") / "search.yaml"
    sweeper = OmegaConf.load(study).hydra.sweeper
    assert f"# Cost: {sweeper.trials} runs" in study.read_text()
    assert sweeper.params["optimizer.lr"] == "tag(log,interval(1e-3,3e-2))"
    for corner in ("1e-3", "3e-2"):
        config = resolve_config(compose("+sweep=search", f"optimizer.lr={corner}"))
        assert config.tracking.wandb.group == "search"


@pytest.mark.slow
def test_averaging_uses_the_runs_of_upsampling(plot):
    averaged, trained = plot.points_of("averaging"), plot.points_of("upsampling")
    assert averaged == trained


@pytest.mark.slow
def test_precision_runs_every_recipe(load_runs):
    study = find_package_dir("sweeps") / "precision.yaml"
    recipes = {config.precision.name for config in load_runs(study)}
    assert recipes == {
        file.stem for file in (find_package_dir("conf") / "precision").glob("*.yaml")
    }


@pytest.fixture(scope="module")
def plot():
    """Load the script that sums up the runs of a study, and compose each study once."""
    file = Path(__file__).resolve().parents[2] / "benchmarks/sweeps/plot.py"
    spec = importlib.util.spec_from_file_location("sweeps_plot", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = functools.cache(module.points_of)
    module.points_of = lambda study: copy.deepcopy(names(study))
    return module


def write_run(folder, losses, bits, end="finish"):
    folder.mkdir(parents=True)
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    events = [
        {"event": "start", "step": 0},
        {"event": "evaluate", "step": 0, "bits_per_byte": {"code": 9.0, "mean": 3.0}},
        {"event": "evaluate", "step": len(rows), "bits_per_byte": {"code": 9.0, "mean": bits}},
        {"event": end, "step": len(rows)},
    ]
    for name, lines in (("metrics.jsonl", rows), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    origin = {"python": "3", "platform": "x", "device": "cpu", "git_revision": None}
    (folder / "provenance.json").write_text(json.dumps(origin | {"packages": {"torch": "2"}}))


@pytest.mark.slow  # 6 s: composes all points of all studies
def test_studies_have_the_same_default_run(load_runs):
    names = set()
    for name, point in (
        ("weight_decay", "optimizer.decay_norms=true"),
        ("init", "model.scaled_init=depth"),
        ("precision", "precision=fp32"),
    ):
        study = find_package_dir("sweeps") / f"{name}.yaml"
        runs = zip(points(study), load_runs(study), strict=True)
        names |= {run.run.name for overrides, run in runs if {*overrides} == {point, "run.seed=2"}}
    assert len(names) == 1


@pytest.mark.slow
def test_runs_are_summed_up_seed_by_seed(plot, tmp_path, monkeypatch):
    line = np.linspace(8, 4, 400)
    noise = np.random.default_rng(0).normal(0, 0.1, 400)
    names = plot.points_of("weight_decay")
    true, false = names.values()
    for seed in ("1", "2", "3"):
        bits = 2.0 + 0.1 * int(seed)
        write_run(tmp_path / "runs" / true[seed], line + noise, bits)
        write_run(tmp_path / "runs" / false[seed], line + 3 * noise, bits + 0.01)
    names["optimizer.decay_norms=false"]["4"] = "bad"
    monkeypatch.setattr(plot, "points_of", lambda study: names)
    write_run(tmp_path / "runs/bad", line, 9.0, end="diverge")
    write_run(tmp_path / "runs/other", line, 1.0)
    result = plot.collect("weight_decay", tmp_path / "runs")
    assert list(result["points"]) == ["optimizer.decay_norms=true", "optimizer.decay_norms=false"]
    first, second = (plot.finished(runs) for runs in result["points"].values())
    assert result["points"]["optimizer.decay_norms=false"]["4"]["ended"] == "diverge"
    assert first["1"]["loss_variance"] == pytest.approx(0.01, rel=0.3)
    assert second["1"]["loss_variance"] == pytest.approx(9 * first["1"]["loss_variance"])
    assert first["1"]["loss"] == pytest.approx((line + noise)[360:].mean())
    table = plot.render(result).splitlines()
    effect = "| optimizer.decay_norms=false - optimizer.decay_norms=true | 3 | +0.0100 | 0.0100 to 0.0100 |"
    assert table[2].startswith(effect)
    assert table[2].endswith(" worse |")
    assert table[7].startswith("| optimizer.decay_norms=false | 3 of 4 | ")
    assert "| 2.2100 (1.9616 to 2.4584) |" in table[7]
    plot.draw(result).savefig(tmp_path / "figure.svg")
