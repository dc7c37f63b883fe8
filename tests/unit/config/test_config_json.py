"""What goes through a pipe arrives as it was, or not at all."""

import json

import pytest
from omegaconf.errors import OmegaConfBaseException

from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section, serialize_sections
from hlat.config.data import DataConfig, EncoderLibrary, SourceConfig
from hlat.config.phase import PhaseConfig, StageConfig

DATA = DataConfig(
    "x",
    sources={"a": SourceConfig(["p"], 0.25)},
    tokenizer="t",
    eos_token="e",
    encoder=EncoderLibrary.fast,
)
PHASE = PhaseConfig("p", [StageConfig("one", 5, {"a": 1.0}), StageConfig("two")])


def test_sections_arrive_as_they_were() -> None:
    line = serialize_sections({"data": DATA, "phase": PHASE, "seed": 3})
    assert "\n" not in line
    plain = json.loads(line)
    assert parse_section(DataConfig, plain["data"]) == DATA
    assert parse_section(PhaseConfig, plain["phase"]) == PHASE
    assert plain["seed"] == 3


@pytest.mark.parametrize("fields", [{"unheard": 1}, {"prefetch": "many"}, {"encoder": "os.system"}])
def test_what_the_schema_does_not_know_is_refused(fields) -> None:
    with pytest.raises(OmegaConfBaseException):
        parse_section(DataConfig, fields)


@pytest.mark.parametrize("fields", [{"root": "${oc.env:HOME}"}, {"sources": {"${x}": {}}}])
def test_what_stands_for_something_else_is_refused(fields) -> None:
    with pytest.raises(ConfigError, match="is an interpolation"):
        parse_section(DataConfig, fields)
