"""Where a run's checkpoints go, made sure of before it trains.

A store that takes nothing would be noticed at the first save, which may be hours later; and a run
whose checkpoints are looked for in another place than before would begin anew without a word.
"""

from pathlib import Path

from hlat.checkpoint import places
from hlat.config.checkpoint import Checkpoint
from hlat.config.errors import ConfigError


def settle(checkpoint: Checkpoint, folder: Path) -> None:
    """Return if the run can save where it is to save, and leave word of that in its folder.

    Args:
        checkpoint: What the configuration says.
        folder: The run's folder, which this process holds.

    Raises:
        ConfigError: The place does not take a small file, or earlier checkpoints of the run are
            somewhere else.
    """
    home = places.home(folder, checkpoint.destination)
    told = f"checkpoint.destination={checkpoint.destination}"
    try:
        if home != folder:
            places.try_out(home)
        before = places.recorded(folder)
        if before != home and _has_saved(before) and not _has_saved(home):
            raise ConfigError(
                f"{told.replace('=None', '=null')}: {folder} has its checkpoints in {before}; set "
                f"it back, or copy {before / 'checkpoints'} to {home / 'checkpoints'}"
            )
        places.record(folder, home)
    except OSError as error:
        raise places.unusable(told, error) from error


def _has_saved(home: places.Place) -> bool:
    return bool(places.steps(home / "checkpoints"))
