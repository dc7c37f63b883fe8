"""Copy of a finished run under a second name, which has the same settings, code and data.

The files of checkpoints are hard links where the file system allows it, else copies. They are never
modified in place, so that each of the two runs can be extended, pruned or removed (docs/adr/0061).
"""

import os
import shutil
from pathlib import Path

from hlat.checkpoint import checkpoint_directory, rollback_log, start_validation
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.distributed import rank_environment
from hlat.storage import durable_files, storage_path
from hlat.storage.remote_path import RemotePath
from hlat.storage.storage_path import StoragePath
from hlat.tracking import finished_runs, run_directory
from hlat.tracking.jsonl_log import open_events_log, open_metrics_log

_CHECKPOINT_DIRS = ("checkpoints", "milestones")


def use_finished_run(config: Config, config_yaml: str, overrides: list[str]) -> bool:
    """Return True if a run has finished with the same settings, code and data.

    The first process of the job prints it, and makes the run directory a copy of it. `config_yaml`
    is the composed configuration and `overrides` are those of the user.

    Raises:
        ConfigError: The run directory or the checkpoints cannot be written.
    """
    start_digest = start_validation.load_start_digest(config)
    source = finished_runs.find_finished_run(config, start_digest)
    run_dir = run_directory.build_run_dir(config.run)
    if source is None or (source != run_dir and not _has_last_checkpoint(source, config)):
        return False
    if rank_environment.is_first_process():
        print(f"nothing to do: {source} has finished with the same settings, code and data")
        if source != run_dir and not _is_complete_copy(run_dir):
            _copy_run(source, config, config_yaml, overrides)
            print(f"{run_dir} is now a copy of it; another run.name with run.repeat=true trains it")
    return True


def _is_complete_copy(run_dir: Path) -> bool:
    return finished_runs.is_copy(run_dir) and open_events_log(run_dir).path.exists()


def _has_last_checkpoint(source: Path, config: Config) -> bool:
    root = checkpoint_directory.build_checkpoint_root(source, config.checkpoint.destination)
    try:
        steps = checkpoint_directory.list_steps(root / "checkpoints")
    except OSError as error:
        raise storage_path.build_unusable_error(str(root), error) from error
    return compute_total_steps(config) in steps


def _copy_run(source: Path, config: Config, config_yaml: str, overrides: list[str]) -> None:
    """Copy a run; events.jsonl, by which a run is finished, is written last."""
    destination = config.checkpoint.destination
    with run_directory.acquire_run_dir(config.run) as run_dir:
        run_directory.validate_no_symlinks(source)
        checkpoint_directory.validate_destination(run_dir, destination)
        roots = [
            checkpoint_directory.build_checkpoint_root(path, destination)
            for path in (source, run_dir)
        ]
        try:
            for name in _CHECKPOINT_DIRS:
                for path in checkpoint_directory.list_steps(roots[0] / name).values():
                    _copy_checkpoint(path, roots[1] / name / path.name)
            files = [root / "checkpoints" / rollback_log.ROLLBACKS_FILE for root in roots]
            if files[0].exists():
                durable_files.replace_file(files[1], files[0].read_bytes(), durable=True)
            provenance = finished_runs.build_copy_provenance(source, compute_total_steps(config))
            run_directory.write_run_metadata(
                run_dir, config_yaml, config.extensions, overrides, provenance
            )
            for open_log in (open_metrics_log, open_events_log):
                content = open_log(source).path.read_bytes()
                durable_files.replace_file(open_log(run_dir).path, content, durable=True)
        except OSError as error:
            raise ConfigError(
                f"{source} cannot be copied to {run_dir} ({error.strerror or error}); correct it, "
                "or train the run with run.repeat=true"
            ) from error


def _copy_checkpoint(source: StoragePath, target: StoragePath) -> None:
    """Copy a checkpoint without links that it may contain."""
    if checkpoint_directory.has_checkpoint(target):
        return
    directory = checkpoint_directory.create_checkpoint_dir(target)
    names = [name for name, size in storage_path.list_sizes(source).items() if size is not None]
    for name in sorted(names, key=lambda name: name == COMMIT_MARKER):
        _copy_file(source / name, directory / name)
    checkpoint_directory.publish_checkpoint(directory, target.name)


def _copy_file(source: StoragePath, target: StoragePath) -> None:
    if isinstance(source, RemotePath):
        assert isinstance(target, RemotePath), "both runs have the same checkpoint.destination"
        source.copy_to(target)
        return
    assert isinstance(target, Path)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or files of another user
        shutil.copyfile(source, target, follow_symlinks=False)
        durable_files.fsync_file(target)
