"""The same run is found again by the same command; another run never is."""

import json

import pytest

from hlat.config.errors import ConfigError
from hlat.config.identity import ORIGIN, adjustable, default_name, fixed, model
from hlat.config.resolve import resolve
from hlat.state import differences

SAME = [
    "run.steps=7",
    "run.root=/elsewhere",
    "run.log_every=3",
    "batch.micro_batch_size=2",
    "checkpoint.every_steps=9",
    "data.encoder=fast",
]
SINGLE = ["hardware=cpu", "parallelism=single", "precision=fp32"]
OTHER = [
    "optimizer.lr=1e-2",
    "run.seed=1",
    "model.num_layers=3",
    "precision=bf16",
    "data.sources.code.weight=0.4",
    "data.document_mask=true",
    "data.loss_mask=true",
    "schedule.name=linear",
    "optimizer.decay_norms=false",
    "phase.timeline=[{name: base, lr: 1e-3}]",
    "model.init_from=folder",
    "model.init_copies=first",
]


@pytest.mark.parametrize("override", SAME)
def test_length_layout_and_place_do_not_make_another_run(compose, override):
    assert default_name(resolve(compose(override))) == default_name(resolve(compose()))


@pytest.mark.parametrize("override", OTHER)
def test_what_changes_the_numbers_makes_another_run(compose, override):
    assert default_name(resolve(compose(override))) != default_name(resolve(compose()))


def test_a_given_name_is_kept(compose):
    assert resolve(compose("run.name=x")).run.name == "x"


def test_no_setting_is_both_fixed_and_adjustable(compose):
    config = resolve(compose())
    assert not set(fixed(config)) & set(adjustable(config))


@pytest.mark.parametrize("key", ["data.document_mask", "data.loss_mask"])
def test_a_mask_may_change_when_a_run_goes_on(compose, key):
    before, after = (resolve(compose(f"{key}={value}")) for value in ("false", "true"))
    assert fixed(before) == fixed(after)
    assert differences(adjustable(before), adjustable(after)) == [f"{key} was False, is True"]


def test_a_stages_own_rate_may_change_when_a_run_goes_on_and_is_told(compose):
    before, after = (
        resolve(compose(f"phase.timeline=[{{name: base, lr: {rate}}}]")) for rate in (1e-3, 2e-3)
    )
    assert fixed(before) == fixed(after)
    (line,) = differences(adjustable(before), adjustable(after))
    assert line.startswith("phase.timeline was [{'name': 'base'")
    assert "'lr': 0.001" in line
    assert "'lr': 0.002" in line


def test_runs_from_before_init_from_keep_their_names(compose):
    assert not ORIGIN.keys() & fixed(resolve(compose())).keys()
    settings = fixed(resolve(compose("model.init_from=folder")))
    assert {key: settings[key] for key in ORIGIN if key in settings} == {
        "model.init_from": "folder"
    }


def test_a_saved_model_comes_back_from_what_is_fixed(compose):
    config = resolve(compose("model=70b", *SINGLE, "model.scaled_init=layer"))
    saved = json.loads(json.dumps(fixed(config)))
    assert model(saved) == config.model
    with pytest.raises(ConfigError, match="was saved by another version of hlat"):
        model(saved | {"model.num_experts": 8})
