"""Evaluation loop: load each model into an engine, run its pending tasks, and save their scores.

Tasks and data sets are loaded first, since they are the most frequent cause of errors. All ranks
build the engine. Rank 0 runs the loop and broadcasts each computation to the other ranks:

    for each model: the one of the request, or each permanent checkpoint of a followed run
        for each task without saved scores
            run the task and save its scores
        record the scores in the events of the run
"""

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.config.config_errors import ExitCode
from hlat.config.run import Config
from hlat.distributed import heartbeat, rank_environment
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine
from hlat.evaluate import (
    checkpoint_watcher,
    evaluation_results,
    heldout_evaluation,
    heldout_task,
    humaneval,
)
from hlat.evaluate.command_broadcast import CommandBroadcaster
from hlat.evaluate.eval_request import EvalRequest, load_humaneval_problems
from hlat.evaluate.eval_tasks import EvalTask, PromptFormat, load_prompt_format, load_tasks
from hlat.evaluate.evaluation_results import ScoreRow, TaskResult
from hlat.evaluate.harness_files import HarnessFiles
from hlat.evaluate.heldout_loss import summarize
from hlat.evaluate.heldout_task import HeldoutData
from hlat.evaluate.paper_tasks import HELDOUT, HUMANEVAL
from hlat.evaluate.request_cache import RequestCache
from hlat.inference import model_source
from hlat.inference.inference_model import InferenceModel
from hlat.inference.model_source import ModelSource
from hlat.storage import storage_path


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
    prompts = load_prompt_format(request, source)
    problems = load_humaneval_problems(request) if HUMANEVAL in request.tasks else []
    heldout = None
    if HELDOUT in request.tasks:
        heldout = heldout_task.load_heldout_data(
            source, request.heldout, request.data_overrides, request.limit
        )
        config = heldout.apply_to(config)
    tasks = load_tasks(request, prompts, len(problems), heldout) if is_rank0 else []
    with closing(create_engine(config)) as engine:
        engine.build(config, training=False, initialize=False)
        heartbeat.record_start()
        source.load_weights(engine.state_shards())
        model = InferenceModel(engine)
        handlers = _build_handlers(engine, model, source, request, problems, heldout)
        broadcaster = CommandBroadcaster(
            model, source.tokenizer, engine.parallel_state.world_group, handlers
        )
        if not is_rank0:
            broadcaster.run_worker_loop()
            return ExitCode.FINISHED
        engine_info = {
            "engine": config.engine.name.value,
            "device": engine.device,
            "tp": config.parallelism.tp,
            "pp": config.parallelism.pp,
            "precision": config.precision.name,
        }
        computation = repr((config.engine.name.value, engine.device, config.precision))
        with broadcaster:
            evaluator = _Evaluator(
                request, prompts, tasks, broadcaster, engine_info, computation, report
            )
            if request.followed_run is None:
                evaluator.evaluate_once(source)
            else:
                evaluator.follow_run(request.followed_run, source)
    return ExitCode.FINISHED


def _build_handlers(
    engine: Engine,
    model: InferenceModel,
    source: ModelSource,
    request: EvalRequest,
    problems: list[humaneval.HumanEvalProblem],
    heldout: HeldoutData | None,
) -> dict[str, Callable[..., Any]]:
    """Return the functions that all ranks execute, by the command that rank 0 broadcasts."""

    def load_checkpoint(location: str) -> None:
        checkpoint_dir = storage_path.parse_storage_path(location)
        run_dir = request.followed_run or checkpoint_dir
        checkpoint = model_source.open_checkpoint(checkpoint_dir, run_dir)
        checkpoint.load_weights(engine.state_shards())

    def run_humaneval(output_dir: str, model_name: str) -> dict[str, float]:
        path, settings = Path(output_dir), request.humaneval_settings
        return humaneval.run_humaneval(
            model, source.tokenizer, problems, path, model_name, settings
        )

    def evaluate_heldout() -> dict[str, Any]:
        assert heldout is not None
        return summarize(heldout_evaluation.evaluate_sources(engine, heldout.sources))

    return {
        "evaluate_heldout": evaluate_heldout,
        "load_checkpoint": load_checkpoint,
        "run_humaneval": run_humaneval,
    }


@dataclass(frozen=True)
class _Evaluator:
    """Evaluation loop of rank 0 for one request.

    `engine_info` is part of the scores, and `computation` part of the key of cached responses.
    """

    request: EvalRequest
    prompts: PromptFormat
    tasks: list[EvalTask]
    broadcaster: CommandBroadcaster
    engine_info: ScoreRow
    computation: str
    report: Callable[[ScoreRow], None]

    @property
    def result_names(self) -> set[str]:
        """Names of the results of all tasks."""
        return {name for task in self.tasks for name in task.result_names}

    def evaluate_once(self, source: ModelSource) -> None:
        """Evaluate the loaded model."""
        completed = self._load_completed_results(source)
        if completed.keys() >= self.result_names:
            print(f"{source.name} has scores on all of these tasks already", flush=True)
        self._evaluate_model(source, completed)

    def follow_run(self, run_dir: Path, source: ModelSource) -> None:
        """Evaluate each permanent checkpoint with pending tasks, until the run has ended.

        `source` is the checkpoint that is loaded already.
        """
        loaded, corrupt = source.location, set[str]()
        while True:
            # Read the state of the run first, or its last checkpoint could be missed
            has_ended = checkpoint_watcher.has_run_ended(run_dir)
            for path in checkpoint_watcher.list_permanent_checkpoints(run_dir):
                checkpoint = model_source.open_checkpoint(path, run_dir)
                completed = self._load_completed_results(checkpoint)
                if str(path) in corrupt or completed.keys() >= self.result_names:
                    continue
                try:
                    checkpoint_store.verify_checkpoint(path)
                except CorruptCheckpointError as error:
                    print(f"WARNING: {error}; it is skipped", file=sys.stderr, flush=True)
                    corrupt.add(str(path))
                    continue
                if checkpoint.location != loaded:
                    self.broadcaster.run("load_checkpoint", str(path))
                    loaded = checkpoint.location
                self._evaluate_model(checkpoint, completed)
            if has_ended:
                return
            self.broadcaster.wait(checkpoint_watcher.POLL_INTERVAL_S)

    def _load_completed_results(self, source: ModelSource) -> dict[str, TaskResult]:
        """Return the saved results at the limit of the request by name, if it skips them."""
        request = self.request
        if not request.skip_completed:
            return {}
        saved = evaluation_results.load_completed_tasks(
            request.output or source.scores_path, request.limit, request.log_samples
        )
        return {
            name: saved[name]
            for name in self.result_names & saved.keys()
            if saved[name].get("settings", {}) == request.harness.to_dict()
        }

    def _evaluate_model(self, source: ModelSource, completed: dict[str, TaskResult]) -> None:
        """Run the pending tasks of the loaded model, and report its scores if there are any."""
        with self._open_cache(source) as self.broadcaster.cache:
            row = self._run_tasks(source, completed)
        if row:
            self.report(row)

    def _open_cache(self, source: ModelSource) -> AbstractContextManager[RequestCache | None]:
        """Open the cache of the responses of a model, if the request has one."""
        if self.request.use_cache is None:
            return nullcontext()
        fingerprint = f"{source.fingerprint} {self.computation}"
        return closing(RequestCache(self.request.use_cache, fingerprint))

    def _run_tasks(self, source: ModelSource, completed: dict[str, TaskResult]) -> ScoreRow:
        """Run the pending tasks, save the results of each, and return all scores.

        The run's events also get the results of `completed`, since an earlier process may have been
        killed before it could write the event.
        """
        request, info = self.request, self.engine_info | {"time": time.time()}
        path = request.output or source.scores_path
        if request.output is not None:  # a wrong path must not fail after hours
            _validate_output(request.output)
        harness_files = self._create_harness_files(path, source)
        new_results: dict[str, TaskResult] = {}
        row: ScoreRow = {}
        try:
            for task in self.tasks:
                if completed.keys() >= {*task.result_names}:
                    continue
                since = time.perf_counter()
                print(f"{source.name}: {task.name}", flush=True)
                results, metadata, harness_results = task.run(source, self.broadcaster)
                if harness_files is not None and harness_results is not None:
                    results = harness_files.save(harness_results, results, request.log_samples)
                    if request.log_samples:
                        print(f"{source.name}: items of {task.name} in {harness_files.directory}")
                if results:  # HumanEval has none if its samples are not executed
                    new_results |= results
                    seconds = time.perf_counter() - since
                    row = evaluation_results.save_scores(
                        source, path, results, info | metadata | {"seconds": seconds}
                    )
        finally:  # also after a signal, even during `save_scores`
            if new_results and path.is_file():
                evaluation_results.record_run_scores(
                    source, evaluation_results.load_scores(path), completed | new_results
                )
        return row

    def _create_harness_files(self, path: Path, source: ModelSource) -> HarnessFiles | None:
        if not self.request.harness_tasks:
            return None
        settings = self.engine_info | self.request.harness.to_config()
        settings |= {"limit": self.request.limit}
        chat_format = self.prompts.chat_format
        template = None if chat_format is None else chat_format.template
        return HarnessFiles(path, source, settings, template, self.prompts.max_length)


def _validate_output(path: Path) -> None:
    """Create the parent of a scores file; raise OSError if this is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
