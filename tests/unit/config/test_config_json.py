"""Sections of a configuration are equal after serialization, or rejected."""

import json

import pytest
from omegaconf.errors import OmegaConfBaseException

from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section, serialize_sections
from hlat.config.data import DataConfig, EncoderLibrary, SourceConfig
from hlat.config.phase import PhaseConfig, PhaseStage

DATA = DataConfig(
    "x",
    sources={"a": SourceConfig(["p"], 0.25)},
    tokenizer="t",
    eos_token="e",
    encoder=EncoderLibrary.fast,
)
PHASE = PhaseConfig("p", [PhaseStage("one", 5, {"a": 1.0}), PhaseStage("two")])


def test_round_trip() -> None:
    line = serialize_sections({"data": DATA, "phase": PHASE, "seed": 3})
    assert "\n" not in line
    plain = json.loads(line)
    assert parse_section(DataConfig, plain["data"]) == DATA
    assert parse_section(PhaseConfig, plain["phase"]) == PHASE
    assert plain["seed"] == 3


@pytest.mark.parametrize("fields", [{"unheard": 1}, {"prefetch": "many"}, {"encoder": "os.system"}])
def test_unknown_keys_and_invalid_values_are_rejected(fields) -> None:
    with pytest.raises(OmegaConfBaseException):
        parse_section(DataConfig, fields)


@pytest.mark.parametrize("fields", [{"root": "${oc.env:HOME}"}, {"sources": {"${x}": {}}}])
def test_interpolations_are_rejected(fields) -> None:
    with pytest.raises(ConfigError, match="is an interpolation"):
        parse_section(DataConfig, fields)
