"""What goes through a pipe arrives as it was, or not at all."""

import json

import pytest
from omegaconf.errors import OmegaConfBaseException

from hlat.config.data import Data, Encoder, Source
from hlat.config.errors import ConfigError
from hlat.config.phase import Phase, Stage
from hlat.config.plain import from_plain, to_json

DATA = Data(
    "x", sources={"a": Source(["p"], 0.25)}, tokenizer="t", eos_token="e", encoder=Encoder.fast
)
PHASE = Phase("p", [Stage("one", 5, {"a": 1.0}), Stage("two")])


def test_sections_arrive_as_they_were() -> None:
    line = to_json({"data": DATA, "phase": PHASE, "seed": 3})
    assert "\n" not in line
    plain = json.loads(line)
    assert from_plain(Data, plain["data"]) == DATA
    assert from_plain(Phase, plain["phase"]) == PHASE
    assert plain["seed"] == 3


@pytest.mark.parametrize("fields", [{"unheard": 1}, {"prefetch": "many"}, {"encoder": "os.system"}])
def test_what_the_schema_does_not_know_is_refused(fields) -> None:
    with pytest.raises(OmegaConfBaseException):
        from_plain(Data, fields)


@pytest.mark.parametrize("fields", [{"root": "${oc.env:HOME}"}, {"sources": {"${x}": {}}}])
def test_what_stands_for_something_else_is_refused(fields) -> None:
    with pytest.raises(ConfigError, match="is an expression"):
        from_plain(Data, fields)
