"""What a service is told of a configuration: values, and no secret that one of them stands for."""

import pytest
import yaml

from hlat.config.config_errors import ConfigError
from hlat.config.recorded_config import redact


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


def test_a_resolver_inside_a_reference_is_left_alone(monkeypatch):
    monkeypatch.setenv("WHICH", "root")
    tree = redact("data: {root: canary}\ncopy: ${data.${oc.env:WHICH}}\n")
    assert tree["copy"] == "${data.${oc.env:WHICH}}"


@pytest.mark.parametrize(
    "name", ["${oc.${kind}:A_SECRET}", "${${whole}:A_SECRET}", "${kind} ${oc.env:A_SECRET}"]
)
def test_a_resolver_whose_name_is_a_reference_is_one_too(name, monkeypatch):
    monkeypatch.setenv("A_SECRET", "canary")
    assert (
        redact(yaml.safe_dump({"kind": "env", "whole": "oc.env", "value": name}))["value"] == name
    )


@pytest.mark.parametrize("text", ["a: {b: ", "a: ${nowhere}", "a: ${a}"])
def test_what_is_no_configuration_is_refused(text):
    with pytest.raises(ConfigError, match="not a configuration"):
        redact(text)
