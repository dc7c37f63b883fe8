"""Questions of the user's own: what is asked, what counts, what is refused."""

import json
import math

import pytest
from omegaconf import OmegaConf

from hlat.config.errors import ConfigError
from hlat.data.tokenizer import EMBEDDED, EMBEDDED_EOS, Tokenizer
from hlat.evaluation import probes

SUM = {"context": "2 + 2 =", "choices": [" 4", " 1000"], "answer": 0}


class Knowing:
    """Finds a text as likely as it is told; nothing else is possible."""

    def __init__(self, known):
        self.known, self._tokenizer = known, Tokenizer(EMBEDDED, ".", EMBEDDED_EOS)

    def score(self, requests):
        for context, _ in requests:
            assert context[0] == self._tokenizer.eos
        return [(self.known[self._text(*request)], False) for request in requests]

    def _text(self, context, continuation):
        return self._tokenizer.decode([*context[1:], *continuation])


@pytest.fixture
def read(compose, tmp_path):
    def read(*lines):
        (tmp_path / "some.jsonl").write_text("\n".join(lines))
        words = (f"data.root={tmp_path}", "+evaluation.probes.some=some.jsonl")
        return probes.read(OmegaConf.to_object(compose(*words)))

    return read


def test_the_likeliest_per_byte_is_the_answer(read):
    found = read(json.dumps(SUM), "", json.dumps(SUM | {"answer": 1}))
    assert [len(questions) for questions in found.values()] == [2]
    known = {"2 + 2 = 4": -3.0, "2 + 2 = 1000": -8.0}  # per byte -1.5 and -1.6
    assert probes.accuracy(Knowing(known), found) == {"some": 0.5}
    known = {"2 + 2 = 4": -3.0, "2 + 2 = 1000": -7.0}
    (questions,) = found.values()
    assert probes.accuracy(Knowing(known), {"first": questions[:1]}) == {"first": 0.0}


@pytest.mark.parametrize(
    ("context", "choice"), [("a", "b"), ("wor", "ld"), ("x ", "y"), ("é", "é")]
)
def test_a_text_is_asked_as_a_whole(read, context, choice):
    """Also where beginning and end share a token: together they are what the tokenizer makes of it."""
    row = {"context": context, "choices": [choice, choice + "?"], "answer": 0}
    ((question,),) = read(json.dumps(row)).values()
    tokenizer = Tokenizer(EMBEDDED, ".", EMBEDDED_EOS)
    for (before, after), end in zip(question.texts, row["choices"], strict=True):
        whole = tokenizer.encode_pieces([context + end])[0].tolist()
        assert [*before, *after] == [tokenizer.eos, *whole]
        assert before
        assert after
    assert question.num_bytes == [len(choice.encode()), len(choice.encode()) + 1]


def test_nothing_is_read_where_nothing_is_asked(compose):
    assert probes.read(OmegaConf.to_object(compose())) == {}


BAD = {
    "{": "line 1: JSONDecodeError",
    "[]": "line 1: TypeError",
    '{"context": "a"}': "line 1: KeyError('choices')",
    json.dumps(SUM | {"context": ""}): "line 1: context=''",
    json.dumps(SUM | {"choices": [" 4"]}): "choices=[' 4']; write two texts or more",
    json.dumps(SUM | {"choices": " 4"}): "choices=' 4'",
    json.dumps(
        SUM | {"answer": 2}
    ): "answer=2 and 2 choices; use the number of the right one, 0 to 1",
    json.dumps(SUM | {"answer": True}): "answer=True",
    json.dumps(SUM | {"answer": math.nan}): "answer=nan",
    " ": "holds no question",
}


@pytest.mark.parametrize(("line", "sentence"), BAD.items())
def test_what_is_no_question_is_refused_with_its_place(read, line, sentence):
    with pytest.raises(ConfigError) as error:
        read(line)
    assert "evaluation.probes.some=" in str(error.value)
    assert sentence in str(error.value)


def test_a_file_that_is_not_there_is_told(compose, tmp_path):
    config = OmegaConf.to_object(
        compose(f"data.root={tmp_path}", "+evaluation.probes.x=none.jsonl")
    )
    with pytest.raises(ConfigError, match=r"evaluation\.probes\.x=.*none\.jsonl cannot be read"):
        probes.read(config)
