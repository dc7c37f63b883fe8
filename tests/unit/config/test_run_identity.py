"""Run names and fixed settings identify a run."""

import json

import pytest

from hlat.config import run_identity
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run_identity import (
    INITIAL_WEIGHTS_DEFAULTS,
    build_default_run_name,
    build_saved_model_config,
    collect_adjustable_settings,
    collect_fixed_settings,
    find_differences,
)

SAME = [
    "run.steps=7",
    "run.root=/elsewhere",
    "run.log_every=3",
    "batch.micro_batch_size=2",
    "checkpoint.every_steps=9",
    "data.encoder=fast",
    "profiler.steps=[3]",
    "profiler.memory=true",
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
    'data.bos_token="</s>"',
    "schedule.name=linear",
    "optimizer.decay_norms=false",
    "phase.timeline=[{name: base, lr: 1e-3}]",
    "model.init_from=folder",
    "model.init_copies=first",
]


@pytest.mark.parametrize("override", SAME)
def test_length_layout_and_directory_do_not_change_the_name(compose, override):
    assert build_default_run_name(resolve_config(compose(override))) == build_default_run_name(
        resolve_config(compose())
    )


@pytest.mark.parametrize("override", OTHER)
def test_settings_that_change_results_change_the_name(compose, override):
    assert build_default_run_name(resolve_config(compose(override))) != build_default_run_name(
        resolve_config(compose())
    )


def test_a_configured_name_is_used(compose):
    assert resolve_config(compose("run.name=x")).run.name == "x"


def test_no_setting_is_both_fixed_and_adjustable(compose):
    config = resolve_config(compose())
    assert not set(collect_fixed_settings(config)) & set(collect_adjustable_settings(config))


@pytest.mark.parametrize("key", ["data.document_mask", "data.loss_mask"])
def test_a_mask_may_change_when_a_run_resumes(compose, key):
    before, after = (resolve_config(compose(f"{key}={value}")) for value in ("false", "true"))
    assert collect_fixed_settings(before) == collect_fixed_settings(after)
    assert find_differences(
        collect_adjustable_settings(before), collect_adjustable_settings(after)
    ) == [f"{key} was False, is True"]


def test_the_rate_of_a_stage_may_change_when_a_run_resumes(compose):
    before, after = (
        resolve_config(compose(f"phase.timeline=[{{name: base, lr: {rate}}}]"))
        for rate in (1e-3, 2e-3)
    )
    assert collect_fixed_settings(before) == collect_fixed_settings(after)
    (line,) = find_differences(
        collect_adjustable_settings(before), collect_adjustable_settings(after)
    )
    assert line.startswith("phase.timeline was [{'name': 'base'")
    assert "'lr': 0.001" in line
    assert "'lr': 0.002" in line


def test_init_from_did_not_change_names_of_existing_runs(compose):
    assert (
        not INITIAL_WEIGHTS_DEFAULTS.keys()
        & collect_fixed_settings(resolve_config(compose())).keys()
    )
    settings = collect_fixed_settings(resolve_config(compose("model.init_from=folder")))
    assert {key: settings[key] for key in INITIAL_WEIGHTS_DEFAULTS if key in settings} == {
        "model.init_from": "folder"
    }


def test_upcycling_did_not_change_names_of_existing_runs(compose):
    moe, key = ("model.mlp.kind=moe", "model.init_from=dense"), "model.mlp.moe.upcycling_noise"
    without = collect_fixed_settings(resolve_config(compose(*moe)))
    assert key not in without
    noises = [resolve_config(compose(*moe, f"{key}={noise}")) for noise in (0, 0.1)]
    assert [collect_fixed_settings(config)[key] for config in noises] == [0.0, 0.1]
    assert len({build_default_run_name(config) for config in noises}) == 2


def test_bos_did_not_change_names_of_existing_runs(compose, monkeypatch):
    hashed = []
    digest = run_identity.hashlib.sha256
    monkeypatch.setattr(
        run_identity.hashlib, "sha256", lambda text: hashed.append(text) or digest(text)
    )
    for overrides in ((), ('data.bos_token="</s>"',)):
        build_default_run_name(resolve_config(compose(*overrides, "run.name=x")))
    assert [b"data.bos_token" in text for text in hashed] == [False, True]


def test_the_saved_model_is_built_from_fixed_settings(compose):
    config = resolve_config(compose("model=70b", *SINGLE, "model.scaled_init=layer"))
    saved = json.loads(json.dumps(collect_fixed_settings(config)))
    assert build_saved_model_config(saved) == config.model
    with pytest.raises(ConfigError, match="was saved by another version of hlat"):
        build_saved_model_config(saved | {"model.num_experts": 8})
