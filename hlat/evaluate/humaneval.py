"""HumanEval (Chen et al., arXiv 2107.03374): pass@k of generated Python functions.

Samples are written to a file before they are executed, and both steps can be resumed. Generated
code runs only with the user's consent, in a sandbox. The tests run in a second sandbox and call the
function through pipes, so that generated code cannot change the verdict.
"""

import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from hlat.config.config_errors import ConfigError
from hlat.data.token_decoder import decode_continuation
from hlat.distributed.object_group import broadcast_object
from hlat.distributed.parallel_state import ParallelState
from hlat.evaluate import humaneval_rpc, sandbox
from hlat.evaluate.sandbox import ProgramResult, ResourceLimits
from hlat.inference.inference_model import InferenceModel, build_stop_check

if TYPE_CHECKING:
    from hlat.data.prompt_tokenizer import PromptTokenizer

STOP_SEQUENCES = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Strings after the end of a function (Chen et al., section 2.1)."""
TEMPERATURES = {1: 0.2, 10: 0.8}
"""Best temperature for each k of pass@k (Chen et al., section 3.3)."""
TOP_P = 0.95
SAMPLES_FILE, VERDICTS_FILE = "samples.jsonl", "verdicts.jsonl"
PASSED_EXIT_CODE = 67
"""Exit code of the test program after its last test."""
_SAMPLES_PER_BATCH = 128
_MAX_DATA_BYTES = 1 << 24
"""Limit of the data file, which has 214 kB."""


@dataclass(frozen=True)
class HumanEvalProblem:
    """Line of HumanEval.jsonl: signature and docstring of a function, and its tests."""

    task_id: str
    prompt: str
    test: str
    entry_point: str


class SampleKey(NamedTuple):
    """Problem, sampling temperature, and index of a sample."""

    task_id: str
    temperature: float
    number: int


@dataclass(frozen=True)
class HumanEvalSettings:
    """Sampling and execution settings.

    Attributes:
        num_samples: Samples per problem and temperature; pass@10 needs ten.
        run_generated_code: Consent to execute generated code.
        accept_weak_sandbox: Consent to execute it without isolation.
        limits: Resource limits of each program.
    """

    num_samples: int = 20
    max_new_tokens: int = 512
    seed: int = 0
    run_generated_code: bool = False
    accept_weak_sandbox: bool = False
    limits: ResourceLimits = field(default_factory=ResourceLimits)


def run_humaneval(
    model: InferenceModel,
    tokenizer: "PromptTokenizer",
    problems: Sequence[HumanEvalProblem],
    output_dir: Path,
    model_name: str,
    settings: HumanEvalSettings,
) -> dict[str, float]:
    """Generate and execute samples, and return pass@1 and pass@10. All ranks call this function.

    Samples and verdicts in `output_dir` on rank 0 are reused; those of another `model_name` or of
    other settings are rejected with a ConfigError, as is a machine that cannot isolate generated
    code.

    Returns:
        `pass@1`, and `pass@10` with at least ten samples; empty without consent.
    """
    parallel = model.parallel_state
    # Existing files contain the hash of this representation
    problems_key = repr(problems).replace("HumanEvalProblem(", "Problem(")
    header = {
        "model": model_name,
        "problems": hashlib.sha256(problems_key.encode()).hexdigest(),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
    }
    record = _JsonlRecord(output_dir / SAMPLES_FILE, header)
    rows = _load_saved_samples(record, settings, parallel)
    completions = {_get_key(row): row["completion"] for row in rows}
    for batch in _generate_samples(model, tokenizer, problems, settings, {*completions}):
        completions |= batch
        if parallel.is_rank0:
            record.append(key._asdict() | {"completion": text} for key, text in batch.items())
    if not settings.run_generated_code:
        if parallel.is_rank0:
            print(
                f"{record.path}: {len(completions)} samples, not executed, since generated code "
                "needs your consent; read docs/humaneval.md, then repeat with "
                "run_generated_code=true"
            )
        return {}
    scores: dict[str, float] = {}
    if parallel.is_rank0:
        passed = _execute_samples(problems, completions, settings, output_dir, header)
        scores = _compute_pass_rates(problems, passed, settings.num_samples)
    return {name: float(v) for name, v in broadcast_object(parallel.world_group, scores).items()}


def _load_saved_samples(
    record: "_JsonlRecord", settings: HumanEvalSettings, parallel: ParallelState
) -> list[dict[str, Any]]:
    """Return the saved samples on all ranks; raise ConfigError on all if rank 0 cannot go on."""
    rows, errors = None, None
    if parallel.is_rank0:
        try:
            if settings.run_generated_code:
                sandbox.validate_isolation(not settings.accept_weak_sandbox)
            rows = record.load_rows()
        except ConfigError as error:
            errors = error.problems
    rows, errors = broadcast_object(parallel.world_group, [rows, errors])
    if errors is not None:
        raise ConfigError(*errors)
    return list(rows)


def list_ks(num_samples: int) -> list[int]:
    """Return each k whose pass@k can be estimated from a number of samples."""
    return [k for k in TEMPERATURES if k <= num_samples]


def load_problems(data_file: Path) -> list[HumanEvalProblem]:
    """Return the problems of HumanEval.jsonl(.gz); raise ConfigError if the file is invalid."""
    names = [field.name for field in fields(HumanEvalProblem)]
    try:
        lines = _read_text(data_file).split("\n")
        return [_parse_problem(json.loads(line), names) for line in lines if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"HumanEval's problems: cannot read {data_file} "
            f"({getattr(error, 'strerror', None) or error}); get HumanEval.jsonl.gz from "
            "https://github.com/openai/human-eval"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"HumanEval's problems: {data_file} is not HumanEval.jsonl, which has "
            f"{', '.join(names)} ({type(error).__name__}: {error})"
        ) from error


def _read_text(data_file: Path) -> str:
    open_file = gzip.open if data_file.suffix == ".gz" else open
    with open_file(data_file, "rb") as file:
        content: bytes = file.read(_MAX_DATA_BYTES + 1)
    if len(content) > _MAX_DATA_BYTES:
        raise ValueError(f"it has more than {_MAX_DATA_BYTES:,} bytes")
    return content.decode()


def _parse_problem(row: dict[str, Any], names: Iterable[str]) -> HumanEvalProblem:
    values = {name: row[name] for name in names}
    for name, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} is not a string")
        value.encode()  # UnicodeEncodeError for half of a surrogate pair
    return HumanEvalProblem(**values)


def compute_pass_at_k(k: int, num_samples: int, num_passed: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., equation 1.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def run_problem_tests(
    problem: HumanEvalProblem, completion: str, settings: HumanEvalSettings
) -> ProgramResult:
    """Run a problem's tests against a completion; the exit code of success is PASSED_EXIT_CODE."""
    source = Path(humaneval_rpc.__file__).read_text()
    name = problem.entry_point
    test_arguments = f"{problem.prompt!r}, {problem.test!r}, {name!r}, {PASSED_EXIT_CODE}"
    tests = f"{source}\nexecute_tests({test_arguments})"
    program = f"{source}\nserve_calls(PipeChannel(), {problem.prompt + completion!r}, {name!r})"
    return sandbox.run_tests(tests, program, settings.limits, not settings.accept_weak_sandbox)


def _generate_samples(
    model: InferenceModel,
    tokenizer: "PromptTokenizer",
    problems: Sequence[HumanEvalProblem],
    settings: HumanEvalSettings,
    existing_keys: set[SampleKey],
) -> Iterator[dict[SampleKey, str]]:
    """Yield batches of the missing completions."""
    prompts = {problem.task_id: tokenizer.encode(problem.prompt) for problem in problems}
    is_finished = build_stop_check(tokenizer, STOP_SEQUENCES)
    temperatures = [TEMPERATURES[k] for k in list_ks(settings.num_samples)]
    total = len(temperatures) * settings.num_samples * len(problems)
    disable = None if model.parallel_state.is_rank0 else True  # None: show it on a terminal
    with tqdm(total=total, desc="HumanEval, sampling", unit="sample", disable=disable) as bar:
        bar.update(len(existing_keys))
        for temperature in temperatures:
            missing = [
                key
                for task_id, number in product(prompts, range(settings.num_samples))
                if (key := SampleKey(task_id, temperature, number)) not in existing_keys
            ]
            for start in range(0, len(missing), _SAMPLES_PER_BATCH):
                batch = missing[start : start + _SAMPLES_PER_BATCH]
                generated = model.generate(
                    [prompts[key.task_id] for key in batch],
                    settings.max_new_tokens,
                    is_finished=is_finished,
                    temperature=temperature,
                    top_p=TOP_P,
                    seed=settings.seed,
                    sample_ids=[_derive_sample_id(key) for key in batch],
                )
                yield {
                    key: _extract_completion(tokenizer, prompts[key.task_id], tokens)
                    for key, tokens in zip(batch, generated, strict=True)
                }
                bar.update(len(batch))


def _get_key(row: Mapping[str, Any]) -> SampleKey:
    return SampleKey(*(row[name] for name in SampleKey._fields))


def _derive_sample_id(key: SampleKey) -> int:
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _extract_completion(
    tokenizer: "PromptTokenizer", prompt: Sequence[int], tokens: list[int]
) -> str:
    """Return the text before the first stop sequence."""
    if tokens[-1] == tokenizer.eos_token_id:
        tokens = tokens[:-1]
    text = decode_continuation(tokenizer, prompt, tokens)
    return text[: min((text.find(s) for s in STOP_SEQUENCES if s in text), default=len(text))]


def _execute_samples(
    problems: Sequence[HumanEvalProblem],
    completions: Mapping[SampleKey, str],
    settings: HumanEvalSettings,
    output_dir: Path,
    header: Mapping[str, Any],
) -> set[SampleKey]:
    """Execute the samples without a verdict, and return those that passed."""
    by_id = {problem.task_id: problem for problem in problems}
    record = _JsonlRecord(output_dir / VERDICTS_FILE, {**header, "limits": asdict(settings.limits)})
    verdicts = {_get_key(row): row["passed"] for row in record.load_rows()}
    missing = [key for key in completions if key not in verdicts]
    total = len(verdicts) + len(missing)
    with (
        tqdm(total=total, desc="HumanEval, execution", unit="sample", disable=None) as bar,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        bar.update(len(verdicts))
        futures = {
            pool.submit(run_problem_tests, by_id[key.task_id], completions[key], settings): key
            for key in missing
        }
        for future in as_completed(futures):
            key, verdict = futures[future], _format_verdict(future.result())
            record.append([key._asdict() | verdict])
            verdicts[key] = verdict["passed"]
            bar.update()
    return {key for key, passed in verdicts.items() if passed}


def _compute_pass_rates(
    problems: Sequence[HumanEvalProblem], passed: set[SampleKey], num_samples: int
) -> dict[str, float]:
    """Return pass@k by name, the mean over all problems."""
    rates = {}
    for k in list_ks(num_samples):
        counts = [
            sum(SampleKey(one.task_id, TEMPERATURES[k], i) in passed for i in range(num_samples))
            for one in problems
        ]
        rates[f"pass@{k}"] = mean(compute_pass_at_k(k, num_samples, count) for count in counts)
    return rates


def _format_verdict(result: ProgramResult) -> dict[str, Any]:
    """Return the verdict, with the last line of output as the reason of a failure."""
    if result.exit_code == PASSED_EXIT_CODE:
        return {"passed": True, "why": ""}
    lines = result.output.strip().splitlines()
    last_line = lines[-1] if lines else f"exit code {result.exit_code}"
    return {"passed": False, "why": result.kill_reason or last_line}


class _JsonlRecord:
    """Append-only JSONL file with a header that identifies its content."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self._header = path, json.loads(json.dumps(header))

    def load_rows(self) -> list[dict[str, Any]]:
        """Return the rows, and remove a partial last line; raise ConfigError for another header."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self._header) + "\n")
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            self.path.write_bytes(complete)
        header, *rows = [json.loads(line) for line in complete.splitlines()] or [{}]
        if header != self._header:
            differing = [key for key in self._header if header.get(key) != self._header[key]]
            raise ConfigError(
                f"{self.path} was created with another {', '.join(differing)}; use another "
                "directory, or remove it"
            )
        return rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows."""
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
