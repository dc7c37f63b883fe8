"""Validation of `checkpoint.destination` before training starts.

A destination that cannot be written would fail at the first save, hours into the run. A changed
destination would restart the run from step 0 without a message.
"""

from pathlib import Path

from hlat.checkpoint import checkpoint_directory
from hlat.config.checkpoint import CheckpointConfig
from hlat.config.config_errors import ConfigError
from hlat.storage import storage_path


def validate_destination(checkpoint: CheckpointConfig, run_dir: Path) -> None:
    """Check that checkpoints can be written to the destination, and record it in `run_dir`.

    Raises:
        ConfigError: The destination does not accept a small file, or earlier checkpoints of the run
            are in another place.
    """
    root = checkpoint_directory.build_checkpoint_root(run_dir, checkpoint.destination)
    setting = f"checkpoint.destination={checkpoint.destination}"
    try:
        if root != run_dir:
            storage_path.validate_writable(root)
        previous = checkpoint_directory.load_checkpoint_root(run_dir)
        if previous != root and _has_checkpoints(previous) and not _has_checkpoints(root):
            raise ConfigError(
                f"{setting.replace('=None', '=null')}: the checkpoints of {run_dir} are in "
                f"{previous}; set it back, or copy {previous / 'checkpoints'} to "
                f"{root / 'checkpoints'}"
            )
        checkpoint_directory.save_checkpoint_root(run_dir, root)
    except OSError as error:
        raise storage_path.build_unusable_error(setting, error) from error


def _has_checkpoints(root: storage_path.StoragePath) -> bool:
    return bool(checkpoint_directory.list_step_dirs(root / "checkpoints"))
