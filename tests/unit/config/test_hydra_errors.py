"""Errors of Hydra are converted to a message with the full key and the nearest valid one."""

import sys

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from hlat.config.config_errors import ConfigError
from hlat.config.hydra_errors import convert_hydra_error, list_config_keys

CASES = [
    ("modle=7b", "modle is not a key of the configuration; did you mean model?"),
    (
        "model=7bb",
        "model=7bb does not exist; did you mean 7b? choices: 13b, 160m, 1b, 70b, 7b, arcee_tiny",
    ),
    (
        "optimizer.beta3=1",
        "optimizer.beta3 is not a key of the configuration; did you mean optimizer.beta2?",
    ),
    ("model.num_layer=1", "did you mean model.num_layers?"),
    ("zzz.qqq=1", "zzz.qqq is not a key of the configuration; `--cfg job` prints all keys"),
    ("batch.zzz=1", "batch has global_batch_size, micro_batch_size, sequence_length"),
    (
        "batch.global_batch_size=many",
        "batch.global_batch_size=many: Value 'many' of type 'str' could not be converted to Integer",
    ),
    (
        "model.norm.placement=pr",
        "model.norm.placement=pr: Invalid value 'pr', expected one of [pre, post, sandwich]",
    ),
    ("+model=7b", "Multiple values for model"),
]


@pytest.mark.parametrize(("override", "sentence"), CASES)
def test_errors_are_one_line(compose, override, sentence):
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        compose(override)
    assert sentence in str(convert_hydra_error(caught.value))
    assert "\n" not in str(convert_hydra_error(caught.value))


def test_keys_reach_every_level():
    assert {"model", "model.rope_theta", "checkpoint.keep_last", "run.log_every"} <= set(
        list_config_keys()
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+model=tiny", "model already has a choice; write model=tiny without the +"),
        ("sweep=beta2", "to choose one of its files, write +sweep=NAME"),
        ("lr=1", "did you mean optimizer.lr?"),
        (
            "study.baseline={optimizer.lr: 1}",
            "study.baseline has no such entry; add one with '+study.baseline={optimizer.lr: 1}'",
        ),
        ("data.root=[~/x]", "~ is not expanded here; write data.root=[$HOME/x]"),
        ("run.steps:5", "run.steps:5: is not an override; write GROUP.KEY=VALUE"),
    ],
)
def test_the_advice_is_the_word_to_type(compose, monkeypatch, override, sentence):
    monkeypatch.setattr(sys, "argv", ["hlat.train", override])
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        compose(override)
    assert sentence in str(convert_hydra_error(caught.value))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("defaults: [{override /model: tiny}]", "experiment=x"),
        ("run: {steps: 5}", "+experiment=x"),
        ("# A comment before the header\n# @package _global_\nrun: {steps: 5}", "experiment=x"),
    ],
)
def test_a_file_without_package_is_named(tmp_path, monkeypatch, text, word):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/x.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["hlat.train", f"--config-dir={tmp_path}", word])
    message = str(convert_hydra_error(HydraException("Could not override 'model'")))
    assert message.startswith(f"{tmp_path}/experiment/x.yaml: ")
    assert message.endswith("lacks the first line `# @package _global_`; add it")


def test_all_problems_of_a_config_error_remain() -> None:
    error = ConfigError("a is missing; add it", "b is 3; set it to 2")
    error.__cause__ = OSError("the text of the cause")
    assert convert_hydra_error(error).problems == error.problems
