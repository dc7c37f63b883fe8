"""Every study has the stated number of runs, which are valid and distinct."""

import functools
import itertools
import re

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
    "averaging": 32,
    "batch_ramp": 20,
    "beta2": 240,
    "beta2_contrasts": 64,
    "beta2_normuon": 12,
    "init": 144,
    "isoflop": 24,
    "ladder": 48,
    "mixture": 32,
    "mixture_phase": 48,
    "moe": 20,
    "optimizers": 35,
    "parallelism": 6,
    "precision": 240,
    "qk_norm": 96,
    "transfer_depth": 128,
    "transfer_width": 128,
    "tokens_per_parameter": 10,
    "tune_lr": 14,
    "tune_moe": 40,
    "tune_optimizers": 84,
    "upsampling": 120,
    "warmup": 96,
    "weight_decay": 96,
    "z_loss": 96,
}
COMMON = ("run.seed=2", "optimizer.lr=0.004")
"""Overrides of one point of each study over learning rates."""
GRIDS = [study for study in STUDIES if study.stem not in ("search", "mixture_proposal")]
SMALLER = (
    *("averaging", "beta2", "beta2_contrasts", "init", "mixture", "precision", "qk_norm"),
    *("mixture_phase", "upsampling", "warmup", "weight_decay", "z_loss"),
)
NUM_PARAMETERS = dict.fromkeys(SMALLER, (5e5, 1e6)) | {
    "isoflop": (2e5, 3e6),
    "ladder": (2e5, 3e6),
    "tokens_per_parameter": (5e5, 1e6),
    "transfer_depth": (2e5, 1e6),
    "transfer_width": (2e5, 1e7),
}
"""Sizes of the models of studies over sizes; the others train a model of 1 to 10 M parameters."""
DEFAULT = {"beta2", "parallelism", "upsampling"}


def points(study):
    """Yield the overrides of each point, as parsed by Hydra's sweeper."""
    axes = OmegaConf.load(study).hydra.sweeper.params
    parsed = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in axes.items()])
    values = [
        list(axis.sweep_string_iterator()) if axis.is_sweep_override() else [str(axis.value())]
        for axis in parsed
    ]
    keys = [axis.key_or_group for axis in parsed]
    grid = OmegaConf.select(OmegaConf.load(study), "study.lr_grid")
    if grid is not None:
        keys.append("optimizer.lr")
        values.append(load_sweep_axes([f"+sweep={study.stem}"]).axes["optimizer.lr"])
    if OmegaConf.select(OmegaConf.load(study), "study.mixture.num_mixtures") is not None:
        keys.append("phase.timeline")
        values.append(load_sweep_axes([f"+sweep={study.stem}"]).axes["phase.timeline"])
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


def test_mixture_proposal_has_the_settings_of_the_sampled_runs(compose, tmp_path, monkeypatch):
    """Compare all settings except the study, its group, and the phase of the config directory."""
    (tmp_path / "phase").mkdir()
    phase = "name: mixture_proposal\ntimeline: [{name: proposal, weights: {code: 1, prose: 1}}]\n"
    (tmp_path / "phase/mixture_proposal.yaml").write_text(phase)
    monkeypatch.setattr("sys.argv", ["hlat", "--config-dir", str(tmp_path)])
    sweep = load_sweep_axes(["+sweep=mixture_proposal"])
    assert len(sweep.list_points()) == 16
    file = find_package_dir("sweeps") / "mixture_proposal.yaml"
    assert "# Cost: 16 runs" in file.read_text()
    sampled = resolve_config(compose("+sweep=mixture", "run.seed=101"))
    base = resolve_config(compose("+sweep=mixture_proposal", "run.seed=101", "phase=base"))
    assert base.tracking.wandb.group == "mixture_proposal"
    assert base.run.name == sampled.run.name
    assert base.evaluation == sampled.evaluation


@pytest.mark.slow
def test_precision_runs_every_recipe(load_runs):
    study = find_package_dir("sweeps") / "precision.yaml"
    recipes = {config.precision.name for config in load_runs(study)}
    assert recipes == {
        file.stem for file in (find_package_dir("conf") / "precision").glob("*.yaml")
    }


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
        names |= {run.run.name for overrides, run in runs if {*overrides} == {point, *COMMON}}
    assert len(names) == 1
