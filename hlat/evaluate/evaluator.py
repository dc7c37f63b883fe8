"""Evaluation loop: load each model into an engine, run the pending tasks, and save their scores.

Tasks and data sets are loaded before the engine is built, since they are the most frequent cause of
errors.
"""

import dataclasses
import errno
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.run import Config
from hlat.distributed import heartbeat, rank_environment
from hlat.engine.engine_factory import create_engine
from hlat.evaluate import (
    checkpoint_watcher,
    evaluation_results,
    heldout_evaluation,
    heldout_task,
    humaneval,
)
from hlat.evaluate.command_broadcast import CommandBroadcaster
from hlat.evaluate.eval_request import EvalRequest, load_humaneval_problems
from hlat.evaluate.evaluation_results import ScoreRow, TaskResult
from hlat.evaluate.harness_files import HarnessFiles
from hlat.evaluate.heldout_loss import summarize
from hlat.evaluate.heldout_task import HeldoutData
from hlat.evaluate.lm_eval_tasks import TaskLoader
from hlat.evaluate.paper_tasks import HELDOUT, HUMANEVAL, TaskSpec
from hlat.evaluate.request_cache import RequestCache
from hlat.inference import model_source
from hlat.inference.chat_format import ChatFormat, load_chat_format
from hlat.inference.inference_model import InferenceModel
from hlat.inference.model_source import ModelSource
from hlat.storage import storage_path

TaskOutcome = tuple[dict[str, TaskResult], ScoreRow, dict[str, Any] | None]
"""Results of a task, metadata for the scores file, and the results of the harness if it ran."""


@dataclass(frozen=True)
class PromptFormat:
    """Chat format of prompts, and the maximum tokens of a prompt and its continuation."""

    chat_format: ChatFormat | None
    max_length: int


@dataclass(frozen=True)
class EvalTask:
    """Task of a request, with the names of its results in a scores file."""

    name: str
    result_names: list[str]
    run: Callable[[ModelSource, CommandBroadcaster], TaskOutcome]


def run_evaluation(
    config: Config,
    request: EvalRequest,
    source: ModelSource,
    report: Callable[[ScoreRow], None],
) -> ExitCode:
    """Run an evaluation on this rank, and call `report` on rank 0 with the scores of each model.

    `source` is the model, or the first checkpoint of a followed run. Raise ConfigError if a task or
    its data set does not exist.
    """
    is_rank0 = rank_environment.read_rank_info().is_rank0
    prompts = _load_prompt_format(request, source)  # raises before the model is loaded
    problems = load_humaneval_problems(request) if HUMANEVAL in request.tasks else []
    heldout = None
    if HELDOUT in request.tasks:
        heldout = heldout_task.load_heldout_data(
            source, request.heldout, request.data_overrides, request.limit
        )
        config = heldout.apply_to(config)
    tasks = _load_tasks(request, prompts, len(problems), heldout) if is_rank0 else []
    with closing(create_engine(config)) as engine:
        engine.build(config, training=False, initialize=False)
        heartbeat.record_start()
        source.load_weights(engine.state_shards())
        model, tokenizer = InferenceModel(engine), source.tokenizer

        def load_checkpoint(location: str) -> None:
            checkpoint_dir = storage_path.parse_storage_path(location)
            run_dir = request.followed_run or checkpoint_dir
            followed = model_source.open_checkpoint(checkpoint_dir, run_dir)
            followed.load_weights(engine.state_shards())

        def run_humaneval(output_dir: str, model_name: str) -> dict[str, float]:
            path, settings = Path(output_dir), request.humaneval_settings
            return humaneval.run_humaneval(model, tokenizer, problems, path, model_name, settings)

        def evaluate_heldout() -> dict[str, Any]:
            assert heldout is not None
            return summarize(heldout_evaluation.evaluate_sources(engine, heldout.sources))

        handlers: dict[str, Callable[..., Any]] = {
            "evaluate_heldout": evaluate_heldout,
            "load_checkpoint": load_checkpoint,
            "run_humaneval": run_humaneval,
        }
        scheduler = CommandBroadcaster(
            model, tokenizer, engine.parallel_state.world_group, handlers
        )
        if not is_rank0:
            scheduler.run_worker_loop()
            return ExitCode.FINISHED
        computation = repr((config.engine.name.value, engine.device, config.precision))
        engine_info = {
            "engine": config.engine.name.value,
            "device": engine.device,
            "tp": config.parallelism.tp,
            "pp": config.parallelism.pp,
            "precision": config.precision.name,
        }
        with scheduler:
            for loaded, completed in _iterate_models(request, source, tasks, scheduler):
                pending = [task for task in tasks if not completed.keys() >= {*task.result_names}]
                info = engine_info | {"time": time.time()}
                with _open_cache(request, loaded, computation) as scheduler.cache:
                    row = _evaluate_model(
                        loaded, request, prompts, pending, completed, scheduler, info
                    )
                if row:
                    report(row)
    return ExitCode.FINISHED


def _load_tasks(
    request: EvalRequest,
    prompts: PromptFormat,
    num_problems: int,
    heldout: HeldoutData | None,
) -> list[EvalTask]:
    tasks = []
    if request.harness_tasks:
        loader = TaskLoader(request.data, request.include_path, request.harness)
        specs = loader.resolve_tasks(request.harness_tasks, request.shots)
        loaded = [loader.load_task(spec) for spec in specs]
        by_name = {name: task for each in loaded for name, task in each["tasks"].items()}
        _validate_settings_used(request, by_name)
        tasks = list(map(partial(_build_harness_task, request, prompts), specs, loaded))
    if HUMANEVAL in request.tasks:
        tasks.append(_build_humaneval_task(request, num_problems))
    if heldout is not None:
        tasks.append(_build_heldout_task(request, heldout))
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
    if problems:
        raise ConfigError(*problems)


def _load_prompt_format(request: EvalRequest, source: ModelSource) -> PromptFormat:
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


@contextmanager
def _open_cache(
    request: EvalRequest, source: ModelSource, computation: str
) -> Iterator[RequestCache | None]:
    """Open the cache of the responses of a model, if the request has one."""
    if request.use_cache is None:
        yield None
        return
    fingerprint = f"{source.fingerprint} {computation}"
    with closing(RequestCache(request.use_cache, fingerprint)) as cache:
        yield cache


def _build_harness_task(
    request: EvalRequest, prompts: PromptFormat, spec: TaskSpec, loaded: Any
) -> EvalTask:
    settings = request.harness.select_tasks([*loaded["tasks"]])
    if settings.doc_ids:  # the paper's tables require the whole data set
        spec = dataclasses.replace(spec, metric="")

    def run(source: ModelSource, scheduler: CommandBroadcaster) -> TaskOutcome:
        from hlat.evaluate.lm_eval_adapter import LMEvalAdapter, run_harness

        adapter = LMEvalAdapter(
            scheduler, prompts.max_length, prompts.chat_format, settings.seed[2]
        )
        num_hits = scheduler.cache.num_hits if scheduler.cache else 0
        harness_results = run_harness(adapter, loaded, request.limit, settings)
        results = evaluation_results.parse_task_results(spec, harness_results, request.limit)
        metadata = {
            "harness": importlib.metadata.version("lm_eval"),
            "shortened": adapter.num_truncated,
            "empty_contexts": adapter.num_empty_contexts,
            "empty_continuations": adapter.num_empty_continuations,
            "without_system": adapter.num_without_system,
            "cached": scheduler.cache.num_hits - num_hits if scheduler.cache else 0,
            "settings": request.harness.to_dict(),
        }
        return results, metadata, harness_results

    names = [spec.name] if spec.name in loaded["groups"] else [*loaded["tasks"]]
    return EvalTask(spec.name, names, run)


def _build_humaneval_task(request: EvalRequest, num_problems: int) -> EvalTask:
    num_samples = request.humaneval_settings.num_samples

    def run(source: ModelSource, scheduler: CommandBroadcaster) -> TaskOutcome:
        suffix = f"_first_{request.limit}" if request.limit else ""
        output_dir = str(source.scores_path.with_name(f"{source.name}_{HUMANEVAL}{suffix}"))
        rates = scheduler.run("run_humaneval", output_dir, source.name)
        results = {
            name: TaskResult(
                shots=0,
                metrics={f"{name},unbiased": rate},
                errors={},
                counts=f"{name},unbiased",
                questions=num_problems,
                limit=request.limit,
            )
            for name, rate in rates.items()
        }
        return results, {"samples": num_samples, "shortened": 0}, None

    return EvalTask(HUMANEVAL, [f"pass@{k}" for k in humaneval.list_ks(num_samples)], run)


def _build_heldout_task(request: EvalRequest, heldout: HeldoutData) -> EvalTask:
    name = HELDOUT if request.heldout is None else f"{HELDOUT}:{request.heldout}"

    def run(source: ModelSource, scheduler: CommandBroadcaster) -> TaskOutcome:
        fields = scheduler.run("evaluate_heldout")
        result = TaskResult(
            shots=0,
            metrics={
                f"{metric},{name}": value
                for metric in ("bits_per_byte", "loss")
                for name, value in fields.pop(metric).items()
            },
            errors={f"bits_per_byte,{name}": v for name, v in fields.pop("stderr").items()},
            counts="",
            questions=heldout.num_sequences,
            limit=request.limit,
        )
        return {name: result}, {"shortened": 0, **fields}, None

    return EvalTask(name, [name], run)


def _iterate_models(
    request: EvalRequest, source: ModelSource, tasks: list[EvalTask], scheduler: CommandBroadcaster
) -> Iterator[tuple[ModelSource, dict[str, TaskResult]]]:
    """Yield the models of a request with their completed results, once the engine has loaded them.

    Checkpoints of a followed run are yielded only if they have pending tasks.
    """
    names = {name for task in tasks for name in task.result_names}
    if request.followed_run is None:
        completed = _load_completed_results(source, request, names)
        if completed.keys() >= names:
            print(f"{source.name} has scores on all of these tasks already", flush=True)
        yield source, completed
        return
    loaded, corrupt = source.location, set[str]()
    while True:
        # Read the state of the run first, or its last checkpoint could be missed
        has_ended = checkpoint_watcher.has_run_ended(request.followed_run)
        for path in checkpoint_watcher.list_permanent_checkpoints(request.followed_run):
            checkpoint = model_source.open_checkpoint(path, request.followed_run)
            completed = _load_completed_results(checkpoint, request, names)
            if str(path) in corrupt or completed.keys() >= names:
                continue
            try:
                checkpoint_store.verify_checkpoint(path)
            except CorruptCheckpointError as error:
                print(f"WARNING: {error}; it is skipped", file=sys.stderr, flush=True)
                corrupt.add(str(path))
                continue
            if checkpoint.location != loaded:
                scheduler.run("load_checkpoint", str(path))
                loaded = checkpoint.location
            yield checkpoint, completed
        if has_ended:
            return
        scheduler.wait(checkpoint_watcher.POLL_INTERVAL_S)


def _load_completed_results(
    source: ModelSource, request: EvalRequest, names: set[str]
) -> dict[str, TaskResult]:
    """Return the saved results at the limit of the request by name, if it skips them."""
    if not request.skip_completed:
        return {}
    saved = evaluation_results.load_completed_tasks(
        request.output or source.scores_path, request.limit, request.log_samples
    )
    return {
        name: saved[name]
        for name in names & saved.keys()
        if saved[name].get("settings", {}) == request.harness.to_dict()
    }


def _validate_output(path: Path) -> None:
    """Create the parent of a scores file; raise OSError if this is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _evaluate_model(
    source: ModelSource,
    request: EvalRequest,
    prompts: PromptFormat,
    tasks: list[EvalTask],
    completed: dict[str, TaskResult],
    scheduler: CommandBroadcaster,
    engine_info: ScoreRow,
) -> ScoreRow:
    """Run tasks, save the results of each as soon as it has finished, and return all scores.

    The run's events also get the results of `completed`, since an earlier process may have been
    killed before it could write the event.
    """
    path = request.output or source.scores_path
    if request.output is not None:  # a wrong path must not fail after hours
        _validate_output(request.output)
    settings = {key: value for key, value in engine_info.items() if key != "time"}
    settings |= request.harness.to_config() | {"limit": request.limit}
    harness_files = None
    if request.harness_tasks:
        template = None if prompts.chat_format is None else prompts.chat_format.template
        harness_files = HarnessFiles(path, source, settings, template, prompts.max_length)
    new_results: dict[str, TaskResult] = {}
    row: ScoreRow = {}
    try:
        for task in tasks:
            since = time.perf_counter()
            print(f"{source.name}: {task.name}", flush=True)
            results, metadata, harness_results = task.run(source, scheduler)
            if harness_files is not None and harness_results is not None:
                results = harness_files.save(harness_results, results, request.log_samples)
                if request.log_samples:
                    print(f"{source.name}: items of {task.name} in {harness_files.directory}")
            if results:  # HumanEval has none if its samples are not executed
                new_results |= results
                info = engine_info | metadata | {"seconds": time.perf_counter() - since}
                row = evaluation_results.save_scores(source, path, results, info)
    finally:  # also after a signal, even during `save_scores`
        if new_results and path.is_file():
            evaluation_results.record_run_scores(
                source, evaluation_results.load_scores(path), completed | new_results
            )
    return row
