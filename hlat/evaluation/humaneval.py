"""HumanEval (Chen et al., arXiv 2107.03374): does what the model writes do what it should?

Samples are written to a file before any is judged, so both can be interrupted. Judging runs what
the model wrote, which nobody has read: only with consent, and in a sandbox. The tests run in
another cell than the program and ask it for answers, so a verdict is never the program's own.
"""

import gzip
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from hlat.config.errors import ConfigError
from hlat.engine.interface import World
from hlat.evaluation import conversation, sandbox
from hlat.evaluation.sandbox import End, Limits
from hlat.evaluation.text_model import TextModel
from hlat.parallelism.group import tell

STOP_WORDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""What comes after a function, not in it (Chen et al., section 2.1)."""
TEMPERATURES = {1: 0.2, 10: 0.8}
"""The best one for each k of pass@k (Chen et al., section 3.3)."""
TOP_P = 0.95
SAMPLES, VERDICTS = "samples.jsonl", "verdicts.jsonl"
PASSED = 67
"""How a judge ends that has come to its end."""
_SAMPLES_AT_ONCE = 128
_LAST_TOKENS = 16
"""Tokens in which a stop word is looked for; the longest has six letters."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    eos: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class Problem:
    """A line of HumanEval.jsonl.

    Attributes:
        task_id: Its name.
        prompt: A function up to its docstring, with what it needs.
        test: Defines `check`, which asserts what a function must do.
        entry_point: The function's name.
    """

    task_id: str
    prompt: str
    test: str
    entry_point: str


@dataclass(frozen=True)
class Sample:
    """What the model wrote.

    Attributes:
        task_id: The problem's.
        temperature: Logits were divided by it.
        number: Which of the samples of this problem and temperature.
        completion: What goes on after the prompt.
    """

    task_id: str
    temperature: float
    number: int
    completion: str

    @property
    def key(self) -> tuple[str, float, int]:
        """What tells it from the others."""
        return self.task_id, self.temperature, self.number


@dataclass(frozen=True)
class Settings:
    """How samples are drawn and judged.

    Attributes:
        num_samples: Of each problem and temperature; pass@10 needs ten.
        max_new_tokens: Where a completion ends at the latest.
        seed: Of what is drawn.
        run_generated_code: Consent to run what the model wrote; without it nothing is judged.
        accept_weak_sandbox: Consent to run it where the kernel does not isolate it.
        limits: Of each program.
    """

    num_samples: int = 20
    max_new_tokens: int = 512
    seed: int = 0
    run_generated_code: bool = False
    accept_weak_sandbox: bool = False
    limits: Limits = field(default_factory=Limits)


def run(
    model: TextModel,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    folder: Path,
    model_name: str,
    settings: Settings | None = None,
) -> dict[str, float]:
    """Draw samples, judge them, and return pass@1 and pass@10; all ranks do so together.

    Args:
        model: Writes the samples.
        tokenizer: The model's.
        problems: What is to be solved.
        folder: Where the first rank keeps samples and verdicts; what is there is not made again.
        model_name: What tells the model from others, so that samples of one are not taken for
            another's.
        settings: How.

    Returns:
        `pass@1`, and `pass@10` if there are ten samples; nothing without consent to judge.

    Raises:
        ConfigError: The folder holds samples that were drawn otherwise, or this machine cannot
            keep generated code in.
    """
    settings = settings or Settings()
    world = model.world
    header = {
        "model": model_name,
        "problems": hashlib.sha256(repr(problems).encode()).hexdigest(),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
    }
    record = _Record(folder / SAMPLES, header)

    def begin() -> list[Any]:
        if settings.run_generated_code:
            sandbox.check(not settings.accept_weak_sandbox)
        return record.read()

    samples = [Sample(**row) for row in _by_the_first(world, begin)]
    for some in _drawn(model, tokenizer, problems, settings, {sample.key for sample in samples}):
        samples += some
        if world.chief:
            record.add([asdict(sample) for sample in some])
    if not settings.run_generated_code:
        if world.chief:
            print(
                f"{record.path}: {len(samples)} samples, not judged, since that runs what the "
                "model wrote; read docs/humaneval.md, then repeat with run_generated_code=true"
            )
        return {}
    own = _judged(problems, samples, settings, folder, header) if world.chief else {}
    return {name: float(value) for name, value in tell(world.everyone, own).items()}


def _by_the_first(world: World, act: Callable[[], Any]) -> Any:
    """What the first rank finds, on all; what it refuses, all refuse.

    Raises:
        ConfigError: The first rank raised it.
    """
    found, problems = None, None
    if world.chief:
        try:
            found = act()
        except ConfigError as error:
            problems = error.problems
    found, problems = tell(world.everyone, [found, problems])
    if problems is not None:
        raise ConfigError(*problems)
    return found


def read(data_file: Path) -> list[Problem]:
    """The problems of a file.

    Raises:
        ConfigError: It is missing, or not HumanEval's.
    """
    names = [field.name for field in fields(Problem)]
    try:
        content = data_file.read_bytes()
        if data_file.suffix == ".gz":
            content = gzip.decompress(content)
        rows = [json.loads(line) for line in content.decode().split("\n") if line.strip()]
        return [Problem(**{name: row[name] for name in names}) for row in rows]
    except OSError as error:
        raise ConfigError(
            f"HumanEval's problems: cannot read {data_file} ({error.strerror or error}); get "
            "HumanEval.jsonl.gz from https://github.com/openai/human-eval"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"HumanEval's problems: {data_file} is no HumanEval.jsonl, whose lines have "
            f"{', '.join(names)} ({type(error).__name__}: {error})"
        ) from error


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The unbiased estimate that one of k samples passes: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., equation 1.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def judge(problem: Problem, completion: str, settings: Settings) -> End:
    """Run a problem's tests against a completion; the status is PASSED if it holds them all."""
    source = Path(conversation.__file__).read_text()
    tests = (
        f"{source}\njudge({problem.prompt!r}, {problem.test!r}, {problem.entry_point!r}, {PASSED})"
    )
    program = f"{source}\nserve(Line(), {problem.prompt + completion!r}, {problem.entry_point!r})"
    isolated = not settings.accept_weak_sandbox
    return sandbox.run_against(tests, program, settings.limits, isolated)


def _drawn(
    model: TextModel,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    settings: Settings,
    there: set[tuple[str, float, int]],
) -> Iterator[list[Sample]]:
    """The samples that are missing, some at a time."""
    temperatures = [t for k, t in TEMPERATURES.items() if k <= settings.num_samples]
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    total = len(temperatures) * settings.num_samples * len(problems)
    with _bar("HumanEval, drawing", total, model.world.chief) as bar:
        bar.update(len(there))
        for temperature in temperatures:
            missing = [
                (place, number)
                for place, problem in enumerate(problems)
                for number in range(settings.num_samples)
                if (problem.task_id, temperature, number) not in there
            ]
            for start in range(0, len(missing), _SAMPLES_AT_ONCE):
                some = missing[start : start + _SAMPLES_AT_ONCE]
                written = model.generate(
                    [prompts[place] for place, _ in some],
                    settings.max_new_tokens,
                    finished=lambda tokens: _ends(tokenizer, tokens),
                    temperature=temperature,
                    top_p=TOP_P,
                    seed=settings.seed,
                    numbers=[
                        _number(problems[place].task_id, temperature, number)
                        for place, number in some
                    ],
                )
                yield [
                    Sample(
                        problems[place].task_id,
                        temperature,
                        number,
                        _completion(tokenizer, prompts[place], tokens),
                    )
                    for (place, number), tokens in zip(some, written, strict=True)
                ]
                bar.update(len(some))


def _number(task_id: str, temperature: float, number: int) -> int:
    digest = hashlib.blake2b(f"{task_id} {temperature} {number}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _ends(tokenizer: Tokenizer, tokens: list[int]) -> bool:
    """Whether the function is over."""
    if tokens[-1] == tokenizer.eos:
        return True
    text = tokenizer.decode(tokens[-_LAST_TOKENS:])
    return any(word in text for word in STOP_WORDS)


def _completion(tokenizer: Tokenizer, prompt: Sequence[int], tokens: list[int]) -> str:
    """The text of a function's rest, decoded with its prompt, as words may begin with a space."""
    if tokens[-1] == tokenizer.eos:
        tokens = tokens[:-1]
    before = [int(token) for token in prompt]
    text = tokenizer.decode(before + tokens)[len(tokenizer.decode(before)) :]
    return text[: min((text.find(word) for word in STOP_WORDS if word in text), default=len(text))]


def _judged(
    problems: Sequence[Problem],
    samples: Iterable[Sample],
    settings: Settings,
    folder: Path,
    header: Mapping[str, Any],
) -> dict[str, float]:
    """Judge what was not judged yet, and count."""
    by_id = {problem.task_id: problem for problem in problems}
    record = _Record(folder / VERDICTS, {**header, "limits": asdict(settings.limits)})
    rows = record.read()
    there = {(row["task_id"], row["temperature"], row["number"]) for row in rows}
    missing = [sample for sample in samples if sample.key not in there]
    with (
        _bar("HumanEval, judging", len(there) + len(missing), True) as bar,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        bar.update(len(there))
        ends = {
            pool.submit(judge, by_id[sample.task_id], sample.completion, settings): sample
            for sample in missing
        }
        for done in as_completed(ends):
            sample, end = ends[done], done.result()
            row = asdict(sample) | {"passed": end.status == PASSED, "why": _why(end)}
            del row["completion"]
            record.add([row])
            rows.append(row)
            bar.update()
    return _scores(problems, rows, settings.num_samples)


def _scores(
    problems: Sequence[Problem], rows: Iterable[Mapping[str, Any]], num_samples: int
) -> dict[str, float]:
    passed = {(row["task_id"], row["temperature"], row["number"]) for row in rows if row["passed"]}
    scores = {}
    for k, temperature in TEMPERATURES.items():
        if k > num_samples:
            continue
        counts = [
            sum((problem.task_id, temperature, i) in passed for i in range(num_samples))
            for problem in problems
        ]
        estimates = [pass_at(k, num_samples, count) for count in counts]
        scores[f"pass@{k}"] = sum(estimates) / len(estimates)
    return scores


def _why(end: End) -> str:
    """Why a judge did not come to its end: the last line that it printed."""
    if end.status == PASSED:
        return ""
    lines = end.output.strip().splitlines()
    return end.why or (lines[-1] if lines else f"exit code {end.status}")


def _bar(label: str, total: int, shown: bool) -> "tqdm[Any]":
    return tqdm(total=total, desc=label, unit="sample", disable=None if shown else True)


class _Record:
    """A file of JSON lines that grows, the first of which says what the others belong to."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self._header = path, json.loads(json.dumps(header))

    def read(self) -> list[dict[str, Any]]:
        """What is there; a line that an interruption has cut off is removed.

        Raises:
            ConfigError: It belongs to something else.
        """
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self._header) + "\n")
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            self.path.write_bytes(whole)
        header, *rows = [json.loads(line) for line in whole.splitlines()] or [{}]
        if header != self._header:
            differing = [key for key in self._header if header.get(key) != self._header[key]]
            raise ConfigError(
                f"{self.path} was made with another {', '.join(differing)}; choose another folder, "
                "or remove it"
            )
        return rows

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write lines at the end."""
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
