"""Tasks of an evaluation: those of lm-evaluation-harness, HumanEval and the held-out loss.

Tasks run on rank 0, which broadcasts the computations to all ranks. A task has a name and
`result_names`, the names of its results in a scores file; `run` returns the results of a model.
"""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.evaluate import evaluation_results, humaneval
from hlat.evaluate.command_broadcast import CommandBroadcaster
from hlat.evaluate.eval_request import EvalRequest
from hlat.evaluate.evaluation_results import ScoreRow, TaskResult
from hlat.evaluate.heldout_task import HeldoutData
from hlat.evaluate.lm_eval_tasks import TaskLoader
from hlat.evaluate.paper_tasks import HELDOUT, HUMANEVAL, TaskSpec
from hlat.inference.chat_format import ChatFormat, load_chat_format
from hlat.inference.model_source import ModelSource


class TaskOutcome(NamedTuple):
    """Results of a task by name, metadata for the scores file, and the output of the harness."""

    results: dict[str, TaskResult]
    metadata: ScoreRow
    harness_results: dict[str, Any] | None = None


@dataclass(frozen=True)
class PromptFormat:
    """Chat format of prompts, and the maximum tokens of a prompt and its continuation."""

    chat_format: ChatFormat | None
    max_length: int


def load_tasks(
    request: EvalRequest, prompts: PromptFormat, num_problems: int, heldout: HeldoutData | None
) -> "list[EvalTask]":
    """Load the tasks of a request; raise ConfigError if a task or its data set does not exist."""
    tasks: list[EvalTask] = []
    if request.harness_tasks:
        loader = TaskLoader(request.data, request.include_path, request.harness)
        specs = loader.resolve_tasks(request.harness_tasks, request.shots)
        loaded = [loader.load_task(spec) for spec in specs]
        by_name = {name: task for each in loaded for name, task in each["tasks"].items()}
        _validate_settings_used(request, by_name)
        tasks += [
            HarnessTask(request, prompts, spec, task)
            for spec, task in zip(specs, loaded, strict=True)
        ]
    if HUMANEVAL in request.tasks:
        tasks.append(HumanEvalTask(request, num_problems))
    if heldout is not None:
        tasks.append(HeldoutTask(request, heldout.num_sequences))
    return tasks


def _validate_settings_used(request: EvalRequest, tasks: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of the harness that concern none of the tasks."""
    settings, names = request.harness, [*tasks]
    problems = [
        f"doc_ids= names {name}, which is none of the tasks: {', '.join(names[:5])}"
        + ", ..." * (len(names) > 5)
        for name in settings.doc_ids
        if name not in names
    ]
    if settings.gen_kwargs and all(task.OUTPUT_TYPE != "generate_until" for task in tasks.values()):
        problems.append("gen_kwargs= has no effect, since no task generates text; remove it")
    raise_config_errors(problems)


def load_prompt_format(request: EvalRequest, source: ModelSource) -> PromptFormat:
    """Return the format of prompts; raise ConfigError if the model does not support it."""
    template, chat_format = request.harness.apply_chat_template, None
    if template is not False:
        chat_format = load_chat_format(source, None if template is True else str(template))
        if chat_format.template is None:
            raise ConfigError(
                f"apply_chat_template={str(template).lower()}: {source.location} has no chat "
                "template; remove it, or give a model with chat_template.jinja or one in "
                "tokenizer_config.json"
            )
    max_length = request.harness.max_length or source.sequence_length
    if max_length > source.sequence_length:
        raise ConfigError(
            f"max_length={max_length} is larger than the context of the model, "
            f"{source.sequence_length}; use at most {source.sequence_length}"
        )
    return PromptFormat(chat_format, max_length)


class HarnessTask:
    """Task or group of lm-evaluation-harness, `loaded` with its data set."""

    def __init__(
        self, request: EvalRequest, prompts: PromptFormat, spec: TaskSpec, loaded: Any
    ) -> None:
        self.name = spec.name
        self.result_names = [spec.name] if spec.name in loaded["groups"] else [*loaded["tasks"]]
        self._request, self._prompts, self._loaded = request, prompts, loaded
        self._settings = request.harness.select_tasks([*loaded["tasks"]])
        # The paper's tables require the whole data set
        self._spec = dataclasses.replace(spec, metric="") if self._settings.doc_ids else spec

    def run(self, source: ModelSource, broadcaster: CommandBroadcaster) -> TaskOutcome:
        """Run the harness with the model as its language model."""
        from hlat.evaluate.lm_eval_adapter import LMEvalAdapter, run_harness

        prompts, settings, limit = self._prompts, self._settings, self._request.limit
        adapter = LMEvalAdapter(
            broadcaster, prompts.max_length, prompts.chat_format, settings.seed[2]
        )
        num_hits = broadcaster.cache.num_hits if broadcaster.cache else 0
        harness_results = run_harness(adapter, self._loaded, limit, settings)
        results = evaluation_results.parse_task_results(self._spec, harness_results, limit)
        metadata = {
            "harness": importlib.metadata.version("lm_eval"),
            "shortened": adapter.num_truncated,
            "empty_contexts": adapter.num_empty_contexts,
            "empty_continuations": adapter.num_empty_continuations,
            "without_system": adapter.num_without_system,
            "cached": broadcaster.cache.num_hits - num_hits if broadcaster.cache else 0,
            "settings": self._request.harness.to_dict(),
        }
        return TaskOutcome(results, metadata, harness_results)


class HumanEvalTask:
    """HumanEval: pass@k of generated functions."""

    name = HUMANEVAL

    def __init__(self, request: EvalRequest, num_problems: int) -> None:
        self._num_samples = request.humaneval_settings.num_samples
        self._num_problems, self._limit = num_problems, request.limit
        self.result_names = [f"pass@{k}" for k in humaneval.list_ks(self._num_samples)]

    def run(self, source: ModelSource, broadcaster: CommandBroadcaster) -> TaskOutcome:
        """Sample the functions on all ranks, and execute them if the user consents."""
        suffix = f"_first_{self._limit}" if self._limit else ""
        output_dir = str(source.scores_path.with_name(f"{source.name}_{HUMANEVAL}{suffix}"))
        rates = broadcaster.run("run_humaneval", output_dir, source.name)
        results = {
            name: TaskResult(
                shots=0,
                metrics={f"{name},unbiased": rate},
                errors={},
                counts=f"{name},unbiased",
                questions=self._num_problems,
                limit=self._limit,
            )
            for name, rate in rates.items()
        }
        return TaskOutcome(results, {"samples": self._num_samples, "shortened": 0})


class HeldoutTask:
    """Loss and bits per byte of held-out sequences."""

    def __init__(self, request: EvalRequest, num_sequences: int) -> None:
        self.name = HELDOUT if request.heldout is None else f"{HELDOUT}:{request.heldout}"
        self.result_names = [self.name]
        self._num_sequences, self._limit = num_sequences, request.limit

    def run(self, source: ModelSource, broadcaster: CommandBroadcaster) -> TaskOutcome:
        """Compute the loss on all ranks."""
        fields = broadcaster.run("evaluate_heldout")
        result = TaskResult(
            shots=0,
            metrics={
                f"{metric},{name}": value
                for metric in ("bits_per_byte", "loss")
                for name, value in fields.pop(metric).items()
            },
            errors={f"bits_per_byte,{name}": v for name, v in fields.pop("stderr").items()},
            counts="",
            questions=self._num_sequences,
            limit=self._limit,
        )
        return TaskOutcome({self.name: result}, {"shortened": 0, **fields})


EvalTask = HarnessTask | HumanEvalTask | HeldoutTask
