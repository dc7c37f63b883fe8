"""Evaluation loop: load each model into an engine, run the pending tasks, and save their scores.

Tasks and data sets are loaded before the engine is built, since they are the most frequent cause of
errors.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.config.config_errors import ExitCode
from hlat.config.run import Config
from hlat.engine import launch_environment
from hlat.engine.engine_factory import create_engine
from hlat.evaluate import (
    checkpoint_watcher,
    evaluation_results,
    humaneval,
    model_source,
    rank0_scheduler,
)
from hlat.evaluate.eval_request import EvalRequest, load_humaneval_problems
from hlat.evaluate.evaluation_results import ScoreRow, TaskResult
from hlat.evaluate.inference_model import InferenceModel
from hlat.evaluate.lm_eval_tasks import TaskLoader
from hlat.evaluate.model_source import ModelSource
from hlat.evaluate.paper_tasks import HUMANEVAL, TaskSpec
from hlat.evaluate.rank0_scheduler import Rank0Scheduler
from hlat.storage import storage_path

_PASS_AT_K_METRICS = ("pass@1", "pass@10")
"""Names of HumanEval's results in a scores file."""
LoadedTask = tuple[TaskSpec, Any]
"""A task and its data as lm-evaluation-harness loads them."""


@dataclass(frozen=True)
class PendingTasks:
    """Tasks of a request without scores for one model.

    Attributes:
        harness_tasks: Tasks of lm-evaluation-harness.
        humaneval: True if HumanEval is pending.
        completed: Results of the other tasks of the request.
    """

    harness_tasks: list[LoadedTask]
    humaneval: bool
    completed: dict[str, TaskResult]

    def __bool__(self) -> bool:
        return bool(self.harness_tasks) or self.humaneval


def run_evaluation(
    config: Config,
    request: EvalRequest,
    source: ModelSource,
    report: Callable[[ModelSource, ScoreRow], None],
) -> ExitCode:
    """Run an evaluation on this rank, and call `report` on rank 0 with the scores of each model.

    `source` is the model, or the first checkpoint of a followed run.

    Raises:
        ConfigError: A task does not exist, or its data set is missing.
    """
    is_rank0 = launch_environment.read_rank_info().rank == 0
    problems = load_humaneval_problems(request) if HUMANEVAL in request.tasks else []
    harness_tasks = _load_harness_tasks(request) if is_rank0 and request.harness_tasks else []
    with closing(create_engine(config)) as engine:
        engine.build(config, training=False)
        source.load_weights(engine.chunks())
        model, world_group = InferenceModel(engine), engine.world.world_group
        tokenizer, settings = source.tokenizer, request.humaneval_settings

        def load_checkpoint(location: str) -> ModelSource:
            checkpoint_dir = storage_path.parse_storage_path(location)
            run_dir = request.followed_run or checkpoint_dir
            loaded = model_source.open_checkpoint(checkpoint_dir, run_dir)
            loaded.load_weights(engine.chunks())
            return loaded

        def run_humaneval(output_dir: str, model_name: str) -> dict[str, float]:
            path = Path(output_dir)
            return humaneval.run_humaneval(model, tokenizer, problems, path, model_name, settings)

        if not is_rank0:
            handlers: dict[str, Callable[..., Any]] = {
                "load_checkpoint": load_checkpoint,
                "run_humaneval": run_humaneval,
            }
            rank0_scheduler.run_worker_loop(model, tokenizer, world_group, handlers)
            return ExitCode.FINISHED
        with Rank0Scheduler(model, tokenizer, world_group) as scheduler:
            models = _iterate_models(request, source, harness_tasks, scheduler, load_checkpoint)
            for loaded, pending in models:
                results = _run_harness_tasks(loaded, request, pending.harness_tasks, scheduler)
                if pending.humaneval:
                    rates = _run_humaneval(loaded, request, len(problems), scheduler, run_humaneval)
                    results = chain(results, rates)
                engine_info = {
                    "engine": config.engine.name.value,
                    "device": engine.device,
                    "tp": config.parallelism.tp,
                    "pp": config.parallelism.pp,
                    "precision": config.precision.name,
                    "time": time.time(),
                }
                if row := _save_results(loaded, request, results, engine_info, pending.completed):
                    report(loaded, row)
    return ExitCode.FINISHED


def _load_harness_tasks(request: EvalRequest) -> list[LoadedTask]:
    loader = TaskLoader(request.data)
    specs = loader.resolve_tasks(request.harness_tasks, request.shots)
    return [(spec, loader.load_task(spec)) for spec in specs]


def _iterate_models(
    request: EvalRequest,
    source: ModelSource,
    harness_tasks: list[LoadedTask],
    scheduler: Rank0Scheduler,
    load_checkpoint: Callable[[str], ModelSource],
) -> Iterator[tuple[ModelSource, PendingTasks]]:
    """Yield the models of a request with their pending tasks after the engine has loaded them."""
    if request.followed_run is None:
        pending = _find_pending_tasks(source, request, harness_tasks)
        if not pending:
            print(f"{source.name} has scores on all of these tasks already", flush=True)
        yield source, pending
        return
    loaded, corrupt = source, set[str]()
    while True:
        # Read the state of the run first, or its last checkpoint could be missed
        has_ended = checkpoint_watcher.has_run_ended(request.followed_run)
        for path in checkpoint_watcher.list_permanent_checkpoints(request.followed_run):
            checkpoint = model_source.open_checkpoint(path, request.followed_run)
            pending = _find_pending_tasks(checkpoint, request, harness_tasks)
            if str(path) in corrupt or not pending:
                continue
            try:
                checkpoint_store.verify_checkpoint(path)
            except CorruptCheckpointError as error:
                print(f"WARNING: {error}; it is skipped", file=sys.stderr, flush=True)
                corrupt.add(str(path))
                continue
            if checkpoint.location != loaded.location:
                scheduler.dispatch("load_checkpoint", location=str(path))
                loaded = load_checkpoint(str(path))
            yield checkpoint, pending
        if has_ended:
            return
        scheduler.wait(checkpoint_watcher.POLL_INTERVAL_S)


def _find_pending_tasks(
    source: ModelSource, request: EvalRequest, harness_tasks: list[LoadedTask]
) -> PendingTasks:
    """Return the tasks without scores at the limit of the request, or all tasks."""
    humaneval_requested = HUMANEVAL in request.tasks
    if not request.skip_completed:
        return PendingTasks(harness_tasks, humaneval_requested, {})
    path = request.output or evaluation_results.build_scores_path(source)
    saved = evaluation_results.load_completed_tasks(path, request.limit)
    names = {
        spec.name: [spec.name] if spec.name in loaded["groups"] else [*loaded["tasks"]]
        for spec, loaded in harness_tasks
    }
    requested = {*chain(*names.values()), *(_PASS_AT_K_METRICS if humaneval_requested else ())}
    return PendingTasks(
        [task for task in harness_tasks if not set(names[task[0].name]) <= saved.keys()],
        humaneval_requested and "pass@1" not in saved,
        {name: result for name, result in saved.items() if name in requested},
    )


def _run_harness_tasks(
    source: ModelSource,
    request: EvalRequest,
    harness_tasks: list[LoadedTask],
    scheduler: Rank0Scheduler,
) -> Iterator[tuple[dict[str, TaskResult], ScoreRow]]:
    """Yield the results of each task with their metadata."""
    if not harness_tasks:
        return
    from hlat.evaluate.lm_eval_adapter import LMEvalAdapter, run_harness

    version = importlib.metadata.version("lm_eval")
    for spec, loaded in harness_tasks:
        adapter = LMEvalAdapter(scheduler, source.sequence_length)
        print(f"{source.name}: {spec.name}", flush=True)
        harness_results = run_harness(adapter, loaded, request.limit)
        metadata = {"harness": version, "shortened": adapter.num_truncated}
        results = evaluation_results.parse_task_results(spec, harness_results, request.limit)
        yield results, metadata


def _run_humaneval(
    source: ModelSource,
    request: EvalRequest,
    num_problems: int,
    scheduler: Rank0Scheduler,
    run_humaneval: Callable[[str, str], dict[str, float]],
) -> Iterator[tuple[dict[str, TaskResult], ScoreRow]]:
    """Yield HumanEval's results; yield nothing if the samples are not executed."""
    print(f"{source.name}: {HUMANEVAL}", flush=True)
    suffix = f"_first_{request.limit}" if request.limit else ""
    scores_dir = evaluation_results.build_scores_path(source).parent
    output_dir = str(scores_dir / f"{source.name}_{HUMANEVAL}{suffix}")
    scheduler.dispatch("run_humaneval", output_dir=output_dir, model_name=source.name)
    results = {}
    for name, value in run_humaneval(output_dir, source.name).items():
        metric = f"{name},unbiased"
        results[name] = TaskResult(0, {metric: value}, {}, metric, num_problems, request.limit)
    if results:
        yield results, {"samples": request.humaneval_settings.num_samples, "shortened": 0}


def _save_results(
    source: ModelSource,
    request: EvalRequest,
    task_results: Iterable[tuple[dict[str, TaskResult], ScoreRow]],
    engine_info: ScoreRow,
    completed: dict[str, TaskResult],
) -> ScoreRow:
    """Save the results of each task as soon as it has finished, and return all scores.

    The run's events also get the results of `completed`, since an earlier process may have been
    killed before it could write the event.
    """
    path = request.output or evaluation_results.build_scores_path(source)
    new_results: dict[str, TaskResult] = {}
    row: ScoreRow = {}
    since = time.perf_counter()
    try:
        for results, metadata in task_results:
            new_results |= results
            seconds = time.perf_counter() - since
            row = evaluation_results.save_scores(
                source, path, results, engine_info | metadata | {"seconds": seconds}
            )
            since += seconds
    finally:  # also after a signal, even during `save_scores`
        if new_results and path.is_file():
            evaluation_results.record_run_scores(
                source, evaluation_results.load_scores(path), completed | new_results
            )
    return row
