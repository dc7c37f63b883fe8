"""Multiple-choice probes: tokenization, accuracy, and rejected files."""

import json
import math
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.data.tokenizer import EMBEDDED, EMBEDDED_EOS_TOKEN, EMBEDDED_FILE, Tokenizer
from hlat.evaluate import multiple_choice_probes

SUM = {"context": "2 + 2 =", "choices": [" 4", " 1000"], "answer": 0}


class FakeModel:
    """Model with given log-probabilities."""

    def __init__(self, log_probs):
        self._log_probs = log_probs
        self._tokenizer = Tokenizer(EMBEDDED, ".", EMBEDDED_EOS_TOKEN)

    def score(self, requests):
        for context, _ in requests:
            assert context[0] == self._tokenizer.eos_token_id
        return [(self._log_probs[self._text(*request)], False) for request in requests]

    def _text(self, context, continuation):
        return self._tokenizer.decode([*context[1:], *continuation])


@pytest.fixture(scope="module")
def config(compose):
    return OmegaConf.to_object(compose())


@pytest.fixture
def load(config, tmp_path):
    """Return a function that loads the probes `some` from a file in the data directory."""

    def load():
        data = replace(config.data, root=str(tmp_path))
        evaluation = replace(config.evaluation, probes={"some": "some.jsonl"})
        return multiple_choice_probes.load_probes(replace(config, data=data, evaluation=evaluation))

    return load


@pytest.fixture
def read(load, tmp_path):
    def read(*lines):
        (tmp_path / "some.jsonl").write_text("\n".join(lines))
        return load()

    return read


def test_answer_has_the_highest_log_prob_per_character(read):
    probes = read(json.dumps(SUM), "", json.dumps(SUM | {"answer": 1}))
    assert [len(questions) for questions in probes.values()] == [2]
    log_probs = {"2 + 2 = 4": -3.0, "2 + 2 = 1000": -8.0}  # per character -1.5 and -1.6
    result = multiple_choice_probes.evaluate_probes(FakeModel(log_probs), probes)
    assert result["accuracy"] == {"some": 0.5}
    # " 4" has two bytes, " 1000" five
    bits = (3.0 / 2 + 8.0 / 5) / math.log(2) / 2
    assert result["answer_bits_per_byte"] == {"some": pytest.approx(bits, rel=1e-12)}
    log_probs = {"2 + 2 = 4": -3.0, "2 + 2 = 1000": -7.0}
    (questions,) = probes.values()
    result = multiple_choice_probes.evaluate_probes(FakeModel(log_probs), {"first": questions[:1]})
    assert result["accuracy"] == {"first": 0.0}


@pytest.mark.parametrize(("context", "choice"), [("a", "b"), ("wor", "ld"), ("é", "é")])
def test_context_and_choice_are_tokenized_together(read, context, choice):
    """Allow tokens across the boundary."""
    row = {"context": context, "choices": [choice, choice + "?"], "answer": 0}
    ((question,),) = read(json.dumps(row)).values()
    tokenizer = Tokenizer(EMBEDDED, ".", EMBEDDED_EOS_TOKEN)
    for (prefix, suffix), choice_text in zip(question.choices, row["choices"], strict=True):
        expected = tokenizer.encode_chunks([context + choice_text])[0].tolist()
        assert [*prefix, *suffix] == [tokenizer.eos_token_id, *expected]
        assert prefix
        assert suffix
    assert question.num_characters == [len(choice), len(choice) + 1]


def test_context_starts_with_bos_if_documents_do(config, tmp_path):
    content = json.loads(EMBEDDED_FILE.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 4096, "content": "<s>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "some.jsonl").write_text(json.dumps(SUM))
    data = replace(config.data, root=str(tmp_path), tokenizer="tokenizer.json", bos_token="<s>")
    evaluation = replace(config.evaluation, probes={"some": "some.jsonl"})
    with_bos = replace(config, data=data, evaluation=evaluation)
    ((question,),) = multiple_choice_probes.load_probes(with_bos).values()
    tokenizer = Tokenizer(EMBEDDED, ".", EMBEDDED_EOS_TOKEN)
    for (prefix, suffix), choice in zip(question.choices, SUM["choices"], strict=True):
        (ids,) = tokenizer.encode_chunks([SUM["context"] + choice])
        assert [*prefix, *suffix] == [4096, *ids.tolist()]


def test_no_probes(config):
    assert multiple_choice_probes.load_probes(config) == {}


BAD = {
    "{": "line 1: JSONDecodeError",
    "[]": "line 1: TypeError",
    '{"context": "a"}': "line 1: KeyError('choices')",
    json.dumps(SUM | {"context": " "}): "line 1: context=' '",
    json.dumps(SUM | {"choices": [" 4"]}): "choices=[' 4']; give two texts or more",
    json.dumps(SUM | {"choices": " 4"}): "choices=' 4'",
    json.dumps(
        SUM | {"answer": 2}
    ): "answer=2 and 2 choices; use the index of the correct one, 0 to 1",
    json.dumps(SUM | {"answer": True}): "answer=True",
    json.dumps(SUM | {"answer": math.nan}): "answer=nan",
    " ": "contains no question",
}


@pytest.mark.parametrize(("line", "message"), BAD.items())
def test_invalid_question_is_rejected_with_its_location(read, line, message):
    with pytest.raises(ConfigError) as error:
        read(line)
    assert "evaluation.probes.some=" in str(error.value)
    assert message in str(error.value)


def test_missing_file_is_rejected(load):
    with pytest.raises(ConfigError, match=r"evaluation\.probes\.some=.*some\.jsonl cannot be read"):
        load()
