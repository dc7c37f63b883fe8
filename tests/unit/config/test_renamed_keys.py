"""Former keys on the command line, in files of the user and in records, and names of former runs."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.checkpoint.training_state import TrainingState
from hlat.config import (
    config_loader,
    frozen_config,
    recorded_config,
    renamed_keys,
    run_identity,
)
from hlat.config.compose import compose_config
from hlat.config.hydra_errors import list_config_keys
from hlat.config.precision import Dtype
from hlat.config.renamed_keys import RENAMED_KEYS
from hlat.config.resolve import resolve_config
from hlat.config.sweep_axes import load_sweep_axes

FORMER = {
    "precision.weights": "fp32",
    "precision.compute": "fp32",
    "precision.gradients": "fp32",
    "precision.accumulation": "fp32",
    "precision.reduction": "fp32",
    "precision.optimizer_state": "fp32",
    "precision.master_weights": None,
    "precision.copies_drift": False,
    "compiler.inductor": True,
}
GLOBAL = "# @package _global_\n"


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    renamed_keys.print_once.cache_clear()
    config_loader.forget_compositions()


@pytest.fixture
def conf(tmp_path, monkeypatch) -> Path:
    """Return a directory of the user with a recipe."""
    monkeypatch.setattr(sys, "argv", ["hlat", "--config-dir", str(tmp_path)])
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/mine.yaml").write_text(
        "defaults: [bf16, _self_]\nname: mine\naccumulation: fp32\nreduction: fp32\n"
    )
    return tmp_path


def use_former_keys(config_yaml: str) -> str:
    """Return a configuration as an earlier version recorded it."""
    tree = OmegaConf.create(config_yaml)
    for former, now in RENAMED_KEYS.items():
        section, _, name = former.rpartition(".")
        tree[section][name] = tree[section].pop(now.rpartition(".")[2])
    return OmegaConf.to_yaml(tree)


def test_every_former_key_has_a_present_one() -> None:
    assert {*FORMER} == {*RENAMED_KEYS}
    assert {*RENAMED_KEYS.values()} <= {*list_config_keys()}
    assert not {*RENAMED_KEYS} & {*list_config_keys()}


@pytest.mark.parametrize("key", FORMER)
def test_override(key, capsys) -> None:
    value = {None: "null", True: "true", False: "false"}.get(FORMER[key], FORMER[key])
    config = compose_config([f"{key}={value}", f"++{key}={value}"])
    present = OmegaConf.select(config, RENAMED_KEYS[key])
    assert (present.value if isinstance(present, Dtype) else present) == FORMER[key]
    expected = f"hlat: {key} is now {RENAMED_KEYS[key]}; the next version rejects {key}\n"
    assert capsys.readouterr().err == expected


def test_override_of_a_sweep() -> None:
    former = load_sweep_axes(["precision=mixed", "precision.accumulation=bf16,fp32"])
    assert former.axes == {"precision.grad_accum_dtype": ["bf16", "fp32"]}


def test_recipe_of_the_user(conf, capsys) -> None:
    present = ["precision.grad_accum_dtype=fp32", "precision.reduce_dtype=fp32"]
    expected = compose_config(["precision=bf16", "precision.name=mine", *present]).precision
    assert compose_config(["precision=mine"]).precision == expected
    assert "hlat: precision.accumulation is now" in capsys.readouterr().err


def test_experiment_of_the_user(conf, capsys) -> None:
    (conf / "experiment").mkdir()
    (conf / "experiment/mine.yaml").write_text(
        f"{GLOBAL}defaults: [{{override /precision: mixed}}, _self_]\n"
        "precision: {accumulation: bf16}\ncompiler: {inductor: true}\n"
        "study: {baseline: {precision.reduction: fp32}}\n"
        "hydra: {sweeper: {params: {precision.reduction: 'fp32,bf16'}}}\n"
    )
    config = compose_config(["experiment=mine"], return_hydra_config=True)
    assert config.precision.grad_accum_dtype is Dtype.bf16
    assert config.compiler.torch_compile
    assert config.study.baseline == {"precision.reduce_dtype": "fp32"}
    axes = load_sweep_axes(["experiment=mine"]).axes
    assert axes == {"precision.reduce_dtype": ["fp32", "bf16"]}
    assert "precision.reduction is now precision.reduce_dtype" in capsys.readouterr().err


@pytest.mark.slow
def test_records_of_an_earlier_version(compose, tmp_path, capsys) -> None:
    composed = compose("precision=mixed", "+study.baseline={precision.param_dtype: bf16}")
    present = OmegaConf.to_yaml(composed)
    former = use_former_keys(present).replace("precision.param_dtype", "precision.weights")
    assert "param_dtype" not in former
    for special in ("", "# &"):  # both parsers
        settings = recorded_config.load_flat_settings(former + special)
        assert settings == recorded_config.load_flat_settings(present)
    assert recorded_config.redact(former) == recorded_config.redact(present)
    parsed = recorded_config.parse_run_config(former)
    assert parsed == recorded_config.parse_run_config(present)
    assert recorded_config.load_study_design(former).baseline == {"precision.param_dtype": "bf16"}
    assert recorded_config.select_yaml_values(former, "x", "precision.param_dtype") == ["bf16"]
    command_line = frozen_config.CommandLine([], [])
    frozen_config.save_frozen_config(tmp_path, composed, command_line)
    (tmp_path / "config.yaml").write_text(former)
    loaded = frozen_config.load_frozen_config(tmp_path)
    assert OmegaConf.to_object(loaded) == OmegaConf.to_object(composed)
    assert capsys.readouterr().err == ""


def test_state_of_a_checkpoint_of_an_earlier_version(compose) -> None:
    config = resolve_config(compose("hardware=cpu"))
    adjustable = run_identity.collect_adjustable_settings(config)
    former = renamed_keys.restore_former_keys(adjustable)
    assert {key for key in FORMER if key.startswith("precision.")} <= {*former}
    state = TrainingState(adjustable=former).to_json()
    assert TrainingState.from_json(state).adjustable == adjustable


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "tiny-8263bce9"),
        (["precision=mixed", "precision.grad_accum_dtype=bf16"], "tiny-2b5151b7"),
    ],
)
def test_default_names_are_those_of_version_0_1(compose, overrides, name) -> None:
    assert resolve_config(compose("hardware=cpu", *overrides)).run.name == name
