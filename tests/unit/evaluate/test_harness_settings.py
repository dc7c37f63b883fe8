"""Settings of lm-evaluation-harness on the command line."""

import argparse
import json
from collections.abc import Callable
from typing import Any

import pytest

from hlat.config.config_errors import ConfigError
from hlat.evaluate import harness_settings
from hlat.evaluate.eval_request import EvalRequest, validate_request
from hlat.evaluate.harness_settings import HarnessSettings


def test_parse_values_as_the_harness_does() -> None:
    parse = harness_settings.parse_gen_kwargs
    assert parse('temperature=0.7,do_sample=True,until=["a,b","\\n"],max_gen_toks=8') == {
        "temperature": 0.7,
        "do_sample": True,
        "until": ["a,b", "\n"],
        "max_gen_toks": 8,
    }
    assert parse('{"top_p": 0.5}') == {"top_p": 0.5}
    assert parse("until=stop here") == {"until": "stop here"}
    assert harness_settings.parse_seed("7") == (7, 7, 7, 7)
    assert harness_settings.parse_seed("0,1,2,3") == (0, 1, 2, 3)
    assert harness_settings.parse_chat_template("true") is True
    assert harness_settings.parse_chat_template("tool_use") == "tool_use"


def test_indices_are_sorted_and_unique_and_may_be_in_a_file(tmp_path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"a": [3, 1, 3], "b": [0]}))
    expected = {"a": (1, 3), "b": (0,)}
    assert harness_settings.parse_doc_ids(str(file)) == expected
    assert harness_settings.parse_doc_ids(file.read_text()) == expected


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (harness_settings.parse_gen_kwargs, "temperature", "temperature is not of the form key="),
        (harness_settings.parse_gen_kwargs, "{temperature", "is not valid JSON"),
        (harness_settings.parse_seed, "1,2", "1,2 is neither a number nor four numbers"),
        (harness_settings.parse_doc_ids, '{"a": []}', "a: [] is not a list of indices"),
        (harness_settings.parse_doc_ids, '{"a": [-1]}', "a: [-1] is not a list of indices"),
        (harness_settings.parse_doc_ids, '{"a": [true]}', "a: [true] is not a list of indices"),
        (harness_settings.parse_doc_ids, "no.json", "no.json cannot be read"),
        (harness_settings.parse_num_samples, '{"a": [0]}', "select documents with doc_ids="),
        (harness_settings.parse_bool, "yes", "yes is neither true nor false"),
    ],
)
def test_invalid_values_are_refused(parse: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"gen_kwargs": {"top_k": 5}}, {}, "top_k=5 is not supported"),
        ({"fewshot_as_multiturn": True}, {}, "needs apply_chat_template=true"),
        ({"doc_ids": {"a": (0,)}}, {"limit": 3}, "doc_ids= and limit=3 both select documents"),
        ({"seed": (1, 1, 1, 1)}, {"tasks": ("heldout",)}, "seed= is a setting of tasks of lm-ev"),
    ],
)
def test_settings_that_conflict_are_refused(settings, fields, message) -> None:
    tasks = {"tasks": ("boolq",)} | fields
    request = EvalRequest("model", harness=HarnessSettings(**settings), **tasks)
    with pytest.raises(ConfigError) as error:
        validate_request(request)
    assert message in str(error.value)


def test_jobs_and_records_differ_with_the_settings() -> None:
    plain = EvalRequest("model", ("boolq",))
    settings = HarnessSettings(apply_chat_template=True, doc_ids={"boolq": (0, 2)})
    changed = EvalRequest("model", ("boolq",), harness=settings)
    assert changed.build_name() != plain.build_name()
    assert plain.harness.to_dict() == {}
    assert settings.to_dict() == {"apply_chat_template": True, "doc_ids": {"boolq": [0, 2]}}
    assert settings.is_multiturn
    assert settings.select_tasks(["piqa"]).to_dict() == {"apply_chat_template": True}
