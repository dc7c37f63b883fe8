"""HumanEval: estimates of pass@k, resumed samples, and verdicts that programs cannot forge."""

import dataclasses
import gzip
import itertools
import json

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.data.prompt_tokenizer import load_run_tokenizer
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE
from hlat.distributed.parallel_state import ParallelState
from hlat.engine.engine_factory import create_engine
from hlat.evaluate import humaneval, humaneval_rpc, sandbox
from hlat.evaluate.humaneval import PASSED_EXIT_CODE, HumanEvalProblem, HumanEvalSettings
from hlat.evaluate.sandbox import ResourceLimits
from hlat.inference.inference_model import InferenceModel

pytestmark = pytest.mark.xdist_group("sandboxes")

ADD = HumanEvalProblem(
    "Test/0",
    'from typing import List\n\n\ndef add(x: int, y: int) -> int:\n    """Add two numbers.\n    >>> add(2, 3)\n    5\n    """\n',
    "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    import random\n    for _ in range(20):\n        x, y = random.randint(0, 99), random.randint(0, 99)\n        assert candidate(x, y) == x + y, 'wrong sum'\n    assert add(1, 2) == 3\n",
    "add",
)
POLY = HumanEvalProblem(
    "Test/1",
    'def poly(xs: list, x: float):\n    """Evaluate."""\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\ndef pairs(xs: list):\n    """Adjacent elements of xs as tuples, by position, including None."""\n',
    "def check(candidate):\n    assert candidate([1, None, 'a']) == {0: (1, None), 1: (None, 'a')}\n    assert candidate([]) == {}\n    assert poly([1, 2], 3.0) == 7.0\n",
    "pairs",
)
CORRECT = {
    "Test/0": "    return x + y\n",
    "Test/1": "    return {i: both for i, both in enumerate(zip(xs, xs[1:]))}\n",
}
CONSENT = HumanEvalSettings(
    run_generated_code=True, limits=ResourceLimits(seconds=8.0, cpu_seconds=1)
)

try:
    sandbox.validate_isolation()
    IS_ISOLATED = True
except ConfigError:
    IS_ISOLATED = False
needs_sandbox = pytest.mark.skipif(not IS_ISOLATED, reason="bubblewrap cannot isolate programs")


@pytest.mark.parametrize(("n", "c"), [(10, 0), (10, 1), (10, 3), (10, 10), (12, 5)])
@pytest.mark.parametrize("k", [1, 10])
def test_pass_at_k_is_the_fraction_of_subsets_with_a_passing_sample(n, c, k):
    subsets = list(itertools.combinations([i < c for i in range(n)], k))
    assert humaneval.compute_pass_at_k(k, n, c) == pytest.approx(
        sum(map(any, subsets)) / len(subsets)
    )


@needs_sandbox
@pytest.mark.parametrize("problem", [ADD, POLY], ids=["add", "poly"])
def test_correct_completion_passes(problem):
    result = humaneval.run_problem_tests(problem, CORRECT[problem.task_id], CONSENT)
    assert result.exit_code == PASSED_EXIT_CODE, result


WRONG = {
    "wrong": ("    return x - y\n", "wrong sum"),
    "nothing": ("", "wrong sum"),
    "no Python": ("    return x +\n", "SyntaxError"),
    "raises": ("    return x + z\n", "NameError"),
    "exits before the tests": ("    return x + y\nimport os\nos._exit(0)\n", "the program ended"),
    "exits in a test": ("    import os\n    os._exit(0)\n", "the program ended"),
    "exits as if passed": (
        f"    import os\n    os._exit({PASSED_EXIT_CODE})\n",
        "the program ended",
    ),
    "raises SystemExit": (f"    raise SystemExit({PASSED_EXIT_CODE})\n", "SystemExit"),
    "prints that it passed": (
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
    "returns an object": (
        "    class Any:\n        __eq__ = lambda *a: True\n    return Any()\n",
        "not plain data",
    ),
    "defines its own tests": (
        "    return 0\ndef check(candidate):\n    pass\nimport sys\nsys.modules['random'] = None\n",
        "wrong sum",
    ),
    "patches the test program's module": (
        "    import sys\n    sys.exit = lambda *a: None\n    sys.modules['__main__'].execute_tests = None\n    return 0\n",
        "wrong sum",
    ),
    "writes to every descriptor": (
        "    import os\n    for fd in range(3, 256):\n        try: os.write(fd, b'passed\\n')\n        except OSError: pass\n    return 0\n",
        "JSONDecodeError",
    ),
    "closes every descriptor": (
        "    import os\n    os.closerange(0, 64)\n    return 0\n",
        "the program ended",
    ),
    "never returns": ("    while True: pass\n", ""),
    "returns too much": ("    return 'x' * (1 << 23)\n", "message was too long"),
    "prints without end": ("    while True: print('x' * 10**6)\n", ""),
    "nests too deeply": (
        "    a = []\n    for _ in range(10**5): a = [a]\n    return a\n",
        "RecursionError",
    ),
}


@needs_sandbox
@pytest.mark.parametrize(("completion", "why"), WRONG.values(), ids=WRONG)
@pytest.mark.slow_after(6)
def test_wrong_completion_fails(completion, why):
    result = humaneval.run_problem_tests(ADD, completion, CONSENT)
    assert result.exit_code != PASSED_EXIT_CODE
    assert why in humaneval._format_verdict(result)["why"], result


@needs_sandbox
@pytest.mark.slow
def test_sleeping_completion_fails():
    settings = dataclasses.replace(CONSENT, limits=ResourceLimits(seconds=2))
    result = humaneval.run_problem_tests(ADD, "    import time\n    time.sleep(99)\n", settings)
    assert result.exit_code != PASSED_EXIT_CODE
    assert "timed out" in humaneval._format_verdict(result)["why"], result


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -5, 10**400, 1.5, float("inf"), "", 'a"\n\u2028', b"\xff", [], (), {}),
        *([1, (2, [3])], {"a": {1: None}}, {1, 2}, frozenset("ab"), {(1, 2): "x"}),
    ],
)
def test_plain_data_round_trip(value):
    decoded = humaneval_rpc.decode_value(json.loads(json.dumps(humaneval_rpc.encode_value(value))))
    assert decoded == value
    assert type(decoded) is type(value)


class FakeModel:
    """Model that generates the given completions."""

    def __init__(self, tokenizer, completions):
        self.parallel_state, self._tokenizer, self._completions, self.sample_ids = (
            ParallelState(),
            tokenizer,
            completions,
            [],
        )

    def generate(
        self, prompts, max_new_tokens, *, is_finished, temperature, top_p, seed, sample_ids
    ):
        assert top_p == 0.95
        self.sample_ids += sample_ids
        generated = []
        for prompt in prompts:
            tokens = []
            text = self._completions[self._tokenizer.decode(prompt)](temperature)
            for token in [*self._tokenizer.encode(text), self._tokenizer.eos_token_id][
                :max_new_tokens
            ]:
                tokens.append(token)
                if is_finished(tokens):
                    break
            generated.append(tokens)
        return generated


@pytest.fixture(scope="module")
def tokenizer():
    return load_run_tokenizer(EMBEDDED_FILE, EMBEDDED_EOS_TOKEN)


@pytest.fixture
def problems(tmp_path):
    lines = [
        json.dumps(vars(problem) | {"canonical_solution": CORRECT[problem.task_id]})
        for problem in (ADD, POLY)
    ]
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return humaneval.load_problems(path)


@pytest.fixture
def model(tokenizer):
    """Build a model that solves 1/5 of `add` at 0.2, 1/2 at 0.8, and all of `pairs`."""
    counts = itertools.count()

    def add(temperature):
        is_correct = next(counts) % (5 if temperature == 0.2 else 2) == 0
        return (
            "    return x + y\n" if is_correct else "    return 0\n"
        ) + "\n\ndef other():\n    pass"

    return FakeModel(
        tokenizer,
        {ADD.prompt: add, POLY.prompt: lambda temperature: CORRECT["Test/1"]},
    )


TEN = HumanEvalSettings(num_samples=10, run_generated_code=True)


@pytest.mark.slow
@needs_sandbox
def test_scores_of_an_interrupted_and_resumed_evaluation(model, tokenizer, problems, tmp_path):
    out = tmp_path / "out"
    without = HumanEvalSettings(num_samples=10)
    assert humaneval.run_humaneval(model, tokenizer, problems, out, "m", without) == {}
    assert not (out / "verdicts.jsonl").exists()
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 41
    (out / "samples.jsonl").write_text("".join(lines[:-7]) + lines[-7][:20])
    first, model.sample_ids = model.sample_ids, []
    assert len(set(first)) == 40
    completions = {
        row["completion"] for row in map(json.loads, lines[1:]) if row["task_id"] == "Test/0"
    }
    assert completions == {"    return x + y\n\n", "    return 0\n\n"}
    scores = humaneval.run_humaneval(model, tokenizer, problems, out, "m", TEN)
    assert scores == {"pass@1": pytest.approx((0.2 + 1) / 2), "pass@10": pytest.approx(1.0)}
    assert sorted(model.sample_ids) == sorted(first[-7:])
    assert (out / "samples.jsonl").read_text().splitlines(keepends=True)[:34] == lines[:34]
    verdicts = (out / "verdicts.jsonl").read_text().splitlines(keepends=True)
    assert len(verdicts) == 41
    model.sample_ids = []
    (out / "verdicts.jsonl").write_text("".join(verdicts[:36]))
    assert humaneval.run_humaneval(model, tokenizer, problems, out, "m", TEN) == scores
    assert not model.sample_ids


def test_programs_need_consent(model, tokenizer, problems, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "_start_sandbox", lambda *args: pytest.fail("executed"))
    settings = HumanEvalSettings(num_samples=1)
    assert (
        humaneval.run_humaneval(model, tokenizer, problems, tmp_path / "out", "m", settings) == {}
    )
    assert "2 samples, not executed" in (output := capsys.readouterr().out)
    assert "run_generated_code=true" in output
    assert "docs/humaneval.md" in output


def test_samples_of_another_model_are_rejected(model, tokenizer, problems, tmp_path):
    settings = HumanEvalSettings(num_samples=1)
    humaneval.run_humaneval(model, tokenizer, problems, tmp_path / "out", "m", settings)
    with pytest.raises(ConfigError, match=r"samples\.jsonl was created with another model; use"):
        humaneval.run_humaneval(model, tokenizer, problems, tmp_path / "out", "n", settings)


@pytest.mark.parametrize("content", ["{}", "[", '{"task_id": "a", "prompt": "b", "test": "c"}'])
def test_invalid_problem_file_is_rejected(tmp_path, content):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"x\.jsonl is not HumanEval\.jsonl, which has"):
        humaneval.load_problems(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl .*github\.com/openai"):
        humaneval.load_problems(tmp_path / "none.jsonl")


def test_samples_of_an_untrained_model(compose, tokenizer, problems, tmp_path):
    config = resolve_config(
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
    settings = HumanEvalSettings(num_samples=2, max_new_tokens=8)
    contents = []
    for name in ("one", "two"):
        humaneval.run_humaneval(
            InferenceModel(engine), tokenizer, problems, tmp_path / name, "m", settings
        )
        contents.append((tmp_path / name / "samples.jsonl").read_text())
    engine.close()
    assert contents[0] == contents[1]
    rows = [json.loads(line) for line in contents[0].splitlines()][1:]
    assert len({row["completion"] for row in rows}) == len(rows) == 4
