"""Validation of an evaluation before a launcher submits it.

Errors are reported before the job waits in a queue. The validation does not read weights, and
requires neither torch nor lm-evaluation-harness.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hlat.checkpoint import checkpoint_directory
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.config.config_errors import ConfigError
from hlat.evaluate import eval_request, model_metadata
from hlat.evaluate.eval_request import EvalRequest
from hlat.evaluate.inference_config import build_inference_config, build_unverified_config
from hlat.evaluate.lm_eval_tasks import TaskLoader
from hlat.evaluate.paper_tasks import HUMANEVAL
from hlat.jobs.evaluation_job import EvaluationJob


def build_evaluation_job(
    request: EvalRequest,
    arguments: Sequence[str],
    overrides: Sequence[str],
    shares_filesystem: bool,
) -> EvaluationJob:
    """Return the job of an evaluation.

    Args:
        request: Model, tasks and settings.
        arguments: Command-line arguments without overrides of the launcher.
        overrides: Configuration overrides in `arguments`.
        shares_filesystem: The job reads the files of this machine, so that they are validated.
    """
    source, metadata = Path(request.source), None
    if shares_filesystem or source.exists():
        eval_request.validate_request(request)
        metadata = model_metadata.load_metadata(request.source)
        if not request.follow and model_metadata.is_run_dir(source):
            _validate_checkpoint_exists(source, request.step)
        if HUMANEVAL in request.tasks:
            eval_request.load_humaneval_problems(request)
    if metadata is None:
        config, base_dir = build_unverified_config(overrides), Path()
    else:
        config, base_dir = build_inference_config(metadata, overrides), metadata.base_dir
    # Task names are validated only where lm-evaluation-harness is installed
    names = request.harness_tasks if importlib.util.find_spec("lm_eval") is not None else []
    TaskLoader(request.data if shares_filesystem else None).resolve_tasks(names, request.shots)
    if base_dir.is_relative_to(Path.cwd()):
        base_dir = base_dir.relative_to(Path.cwd())
    name = request.build_name()
    return EvaluationJob(name, request.source, base_dir, tuple(arguments), config)


def _validate_checkpoint_exists(run_dir: Path, step: int | None) -> None:
    """Raise ConfigError if a local run lacks the checkpoint to evaluate."""
    root = checkpoint_directory.load_checkpoint_root(run_dir)
    if not isinstance(root, Path):
        return
    names = [path.parent.name for path in (root / "checkpoints").glob(f"step_*/{COMMIT_MARKER}")]
    steps = sorted(int(name[5:]) for name in names if name[5:].isdecimal())
    if not steps:
        raise ConfigError(
            f"{run_dir} contains no checkpoint; follow=true evaluates each as it appears"
        )
    if step is not None and step not in steps:
        available = ", ".join(map(str, steps))
        raise ConfigError(f"step={step}: {run_dir} has no such checkpoint, only {available}")
