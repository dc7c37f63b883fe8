"""HumanEval on problems of its schema: estimates, samples on disk, and verdicts that nobody can fake."""

import gzip
import itertools
import json

import pytest

from hlat.config.errors import ConfigError
from hlat.config.resolve import resolve
from hlat.data.prompts import of_training
from hlat.data.tokenizer import EMBEDDED_EOS, EMBEDDED_FILE
from hlat.engine.create import create_engine
from hlat.engine.interface import World
from hlat.evaluation import conversation, humaneval, sandbox
from hlat.evaluation.humaneval import PASSED, Problem, Settings
from hlat.evaluation.sandbox import Limits
from hlat.evaluation.text_model import TextModel

pytestmark = pytest.mark.xdist_group("cells")

ADD = Problem(
    "Test/0",
    'from typing import List\n\n\ndef add(x: int, y: int) -> int:\n    """Add two numbers.\n    >>> add(2, 3)\n    5\n    """\n',
    "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    import random\n    for _ in range(20):\n        x, y = random.randint(0, 99), random.randint(0, 99)\n        assert candidate(x, y) == x + y, 'wrong sum'\n    assert add(1, 2) == 3\n",
    "add",
)
POLY = Problem(
    "Test/1",
    'def poly(xs: list, x: float):\n    """Evaluate."""\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\ndef pairs(xs: list):\n    """Neighbours of xs as tuples, by place; None is kept."""\n',
    "def check(candidate):\n    assert candidate([1, None, 'a']) == {0: (1, None), 1: (None, 'a')}\n    assert candidate([]) == {}\n    assert poly([1, 2], 3.0) == 7.0\n",
    "pairs",
)
RIGHT = {
    "Test/0": "    return x + y\n",
    "Test/1": "    return {i: both for i, both in enumerate(zip(xs, xs[1:]))}\n",
}
CONSENT = Settings(run_generated_code=True, limits=Limits(seconds=8.0, cpu_seconds=4))

try:
    sandbox.check()
    CELLS = True
except ConfigError:
    CELLS = False
needs_cells = pytest.mark.skipif(not CELLS, reason="this kernel makes no namespaces")


@pytest.mark.parametrize(("n", "c"), [(10, 0), (10, 1), (10, 3), (10, 10), (12, 5)])
@pytest.mark.parametrize("k", [1, 10])
def test_the_estimate_is_the_share_of_all_choices_with_one_that_passes(n, c, k):
    chosen = list(itertools.combinations([i < c for i in range(n)], k))
    assert humaneval.pass_at(k, n, c) == pytest.approx(sum(map(any, chosen)) / len(chosen))


@needs_cells
@pytest.mark.parametrize("problem", [ADD, POLY], ids=["add", "poly"])
def test_what_is_right_passes(problem):
    end = humaneval.judge(problem, RIGHT[problem.task_id], CONSENT)
    assert end.status == PASSED, end


WRONG = {
    "wrong": ("    return x - y\n", "wrong sum"),
    "nothing": ("", "wrong sum"),
    "no Python": ("    return x +\n", "SyntaxError"),
    "raises": ("    return x + z\n", "NameError"),
    "exits before the tests": ("    return x + y\nimport os\nos._exit(0)\n", "the program ended"),
    "exits in a test": ("    import os\n    os._exit(0)\n", "the program ended"),
    "exits as if passed": (f"    import os\n    os._exit({PASSED})\n", "the program ended"),
    "raises SystemExit": (f"    raise SystemExit({PASSED})\n", "SystemExit"),
    "says that it passed": (
        "    print('passed', flush=True)\n    return 0\nprint('passed')\n",
        "wrong sum",
    ),
    "patches builtins": (
        "    return 0\nimport builtins\nbuiltins.AssertionError = KeyError\nbuiltins.exit = lambda *a: None\n",
        "wrong sum",
    ),
    "equals everything": (
        "    class Any(int):\n        __eq__ = lambda *a: True\n    return Any()\n",
        "wrong sum",
    ),
    "is an object of its own": (
        "    class Any:\n        __eq__ = lambda *a: True\n    return Any()\n",
        "no plain data",
    ),
    "defines its own tests": (
        "    return 0\ndef check(candidate):\n    pass\nimport sys\nsys.modules['random'] = None\n",
        "wrong sum",
    ),
    "ends the run from the judge's module": (
        "    import sys\n    sys.exit = lambda *a: None\n    sys.modules['__main__'].judge = None\n    return 0\n",
        "wrong sum",
    ),
    "writes to every descriptor": (
        "    import os\n    for fd in range(3, 20):\n        try: os.write(fd, b'passed\\n')\n        except OSError: pass\n    return 0\n",
        "JSONDecodeError",
    ),
    "closes every descriptor": (
        "    import os\n    os.closerange(0, 64)\n    return 0\n",
        "the program ended",
    ),
    "never returns": ("    while True: pass\n", ""),
    "sleeps": ("    import time\n    time.sleep(99)\n", "timed out"),
    "says too much": ("    return 'x' * (1 << 23)\n", "said too much"),
    "prints without end": ("    while True: print('x' * 10**6)\n", ""),
    "nests too deeply": (
        "    a = []\n    for _ in range(10**5): a = [a]\n    return a\n",
        "RecursionError",
    ),
}


@needs_cells
@pytest.mark.parametrize(("completion", "why"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_fails(completion, why):
    end = humaneval.judge(ADD, completion, CONSENT)
    assert end.status != PASSED
    assert why in humaneval._why(end), end


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -5, 10**400, 1.5, float("inf"), "", 'a"\n\u2028', b"\xff", [], (), {}),
        *([1, (2, [3])], {"a": {1: None}}, {1, 2}, frozenset("ab"), {(1, 2): "x"}),
    ],
)
def test_plain_data_arrives_as_it_was(value):
    found = conversation.decode(json.loads(json.dumps(conversation.encode(value))))
    assert found == value
    assert type(found) is type(value)


class Writer:
    """Writes what it is told to, as a model of which all texts are known."""

    def __init__(self, tokenizer, texts):
        self.world, self._tokenizer, self._texts, self.asked = World(), tokenizer, texts, []

    def generate(self, prompts, max_new_tokens, *, finished, temperature, top_p, seed, numbers):
        assert top_p == 0.95
        self.asked += numbers
        written = []
        for prompt in prompts:
            tokens = []
            text = self._texts[self._tokenizer.decode(prompt)](temperature)
            for token in [*self._tokenizer.encode(text), self._tokenizer.eos][:max_new_tokens]:
                tokens.append(token)
                if finished(tokens):
                    break
            written.append(tokens)
        return written


@pytest.fixture(scope="module")
def tokenizer():
    return of_training(EMBEDDED_FILE, EMBEDDED_EOS)


@pytest.fixture
def problems(tmp_path):
    """As they are read from a file."""
    lines = [
        json.dumps(vars(problem) | {"canonical_solution": RIGHT[problem.task_id]})
        for problem in (ADD, POLY)
    ]
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return humaneval.read(path)


@pytest.fixture
def writer(tokenizer):
    """Of `add` every fifth at 0.2 and every second at 0.8 is right; of `pairs`, all are."""
    counts = itertools.count()

    def add(temperature):
        right = next(counts) % (5 if temperature == 0.2 else 2) == 0
        return ("    return x + y\n" if right else "    return 0\n") + "\n\ndef more():\n    pass"

    return Writer(
        tokenizer,
        {ADD.prompt: add, POLY.prompt: lambda temperature: RIGHT["Test/1"]},
    )


TEN = Settings(num_samples=10, run_generated_code=True)


@needs_cells
def test_scores_count_what_passed(writer, tokenizer, problems, tmp_path):
    found = humaneval.run(writer, tokenizer, problems, tmp_path / "out", "m", TEN)
    assert found == {"pass@1": pytest.approx((0.2 + 1) / 2), "pass@10": pytest.approx(1.0)}
    samples = [
        json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()
    ][1:]
    assert {row["completion"] for row in samples if row["task_id"] == "Test/0"} == {
        "    return x + y\n\n",
        "    return 0\n\n",
    }
    assert len(set(writer.asked)) == 40


@needs_cells
def test_an_interrupted_evaluation_goes_on(writer, tokenizer, problems, tmp_path):
    out = tmp_path / "out"
    without = Settings(num_samples=10)
    assert humaneval.run(writer, tokenizer, problems, out, "m", without) == {}
    assert not (out / "verdicts.jsonl").exists()
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 41
    (out / "samples.jsonl").write_text("".join(lines[:-7]) + lines[-7][:20])
    first, writer.asked = writer.asked, []
    found = humaneval.run(writer, tokenizer, problems, out, "m", TEN)
    assert sorted(writer.asked) == sorted(first[-7:])
    assert (out / "samples.jsonl").read_text().splitlines(keepends=True)[:34] == lines[:34]
    verdicts = (out / "verdicts.jsonl").read_text().splitlines(keepends=True)
    assert len(verdicts) == 41
    writer.asked = []
    (out / "verdicts.jsonl").write_text("".join(verdicts[:30]))
    assert humaneval.run(writer, tokenizer, problems, out, "m", TEN) == found
    assert not writer.asked


def test_without_consent_nothing_runs_and_it_is_said_how(
    writer, tokenizer, problems, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sandbox, "_started", lambda *arguments: pytest.fail("ran"))
    settings = Settings(num_samples=1)
    assert humaneval.run(writer, tokenizer, problems, tmp_path / "out", "m", settings) == {}
    assert "2 samples, not judged" in (said := capsys.readouterr().out)
    assert "run_generated_code=true" in said
    assert "docs/humaneval.md" in said


def test_samples_of_another_model_are_refused(writer, tokenizer, problems, tmp_path):
    settings = Settings(num_samples=1)
    humaneval.run(writer, tokenizer, problems, tmp_path / "out", "m", settings)
    with pytest.raises(ConfigError, match=r"samples\.jsonl was made with another model; choose"):
        humaneval.run(writer, tokenizer, problems, tmp_path / "out", "n", settings)


@pytest.mark.parametrize("content", ["{}", "[", '{"task_id": "a", "prompt": "b", "test": "c"}'])
def test_another_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"x\.jsonl is no HumanEval\.jsonl, whose lines have"):
        humaneval.read(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl .*github\.com/openai"):
        humaneval.read(tmp_path / "none.jsonl")


def test_a_model_writes_samples(compose, tokenizer, problems, tmp_path):
    """A model that knows nothing, from its weights to what is judged."""
    config = resolve(
        compose(
            "model.num_layers=1",
            "model.hidden_size=32",
            "model.intermediate_size=64",
            "model.num_attention_heads=2",
            "model.num_key_value_heads=2",
        )
    )
    engine = create_engine(config)
    engine.build(config)
    settings = Settings(num_samples=2, max_new_tokens=8)
    found = []
    for name in ("one", "two"):
        humaneval.run(TextModel(engine), tokenizer, problems, tmp_path / name, "m", settings)
        found.append((tmp_path / name / "samples.jsonl").read_text())
    engine.close()
    assert found[0] == found[1]
    rows = [json.loads(line) for line in found[0].splitlines()][1:]
    assert len({row["completion"] for row in rows}) == len(rows) == 4
