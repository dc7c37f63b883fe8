"""Recorded configurations contain values, and references instead of secrets."""

import pytest
import yaml
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.recorded_config import load_flat_settings, redact


def test_references_are_resolved_and_the_environment_is_not(monkeypatch):
    monkeypatch.setenv("A_SECRET", "canary")
    typed = {
        "data": {"root": "${oc.env:A_SECRET}/x", "also": "${ oc.env:A_SECRET }", "copy": "${data.root}"},
        "model": {"size": 3, "same": "${model.size}", "list": ["${model.size}", "${oc.decode:'1'}"]},
        "missing": None,
    }  # fmt: skip
    tree = redact(yaml.safe_dump(typed))
    assert tree["model"] == {"size": 3, "same": 3, "list": [3, "${oc.decode:'1'}"]}
    assert tree["data"] == {
        "root": "${oc.env:A_SECRET}/x",
        "also": "${ oc.env:A_SECRET }",
        "copy": "${oc.env:A_SECRET}/x",
    }


def test_a_resolver_inside_a_reference_is_not_resolved(monkeypatch):
    monkeypatch.setenv("WHICH", "root")
    tree = redact("data: {root: canary}\ncopy: ${data.${oc.env:WHICH}}\n")
    assert tree["copy"] == "${data.${oc.env:WHICH}}"


@pytest.mark.parametrize(
    "name", ["${oc.${kind}:A_SECRET}", "${${whole}:A_SECRET}", "${kind} ${oc.env:A_SECRET}"]
)
def test_a_resolver_named_by_a_reference_is_not_resolved(name, monkeypatch):
    monkeypatch.setenv("A_SECRET", "canary")
    assert (
        redact(yaml.safe_dump({"kind": "env", "whole": "oc.env", "value": name}))["value"] == name
    )


@pytest.mark.parametrize("text", ["a: {b: ", "a: ${nowhere}", "a: ${a}"])
def test_invalid_configurations_are_rejected(text):
    with pytest.raises(ConfigError, match="not a configuration"):
        redact(text)


def test_settings_are_those_that_omegaconf_reads(compose) -> None:
    """Compare the fast parser of plain YAML with omegaconf."""
    text = OmegaConf.to_yaml(compose("model=7b", "optimizer.lr=1e-05", "run.name='2024-01-01'"))
    settings = load_flat_settings(text)
    assert settings == load_flat_settings(f"{text}# &")
    assert settings["optimizer.lr"] == 1e-5
    assert settings["run.name"] == "2024-01-01"
