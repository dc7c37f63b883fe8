"""Folders in which neuronx-distributed (NxD) saved: the tag and the ranks, by names alone."""

import re
from pathlib import Path

from hlat.config.errors import ConfigError

_RANK = re.compile(r"dp_rank_00_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
_ANY_RANK = "dp_rank_*.pt"
_SAVED = "model"
"""Folder of a tag that holds the model; the optimizer's is beside it."""
_BEGUN, _DONE = "checkpoint", "done"
"""Files that NxD writes into a tag before and after it saves; its converter writes neither."""


def recognised(path: Path) -> bool:
    """Whether NxD saved here: a tag, what holds tags, or the model of one."""
    places = (_ANY_RANK, f"{_SAVED}/{_ANY_RANK}", f"*/{_SAVED}/{_ANY_RANK}")
    return any(next(path.glob(place), None) is not None for place in places)


def chosen(path: Path) -> Path:
    """The folder of the ranks' files: that of the newest complete tag unless one is named.

    Raises:
        ConfigError: No tag is complete, the named one is not, or which is the newest is unclear.
    """
    if next(path.glob(_ANY_RANK), None) is not None:
        return path
    if next(path.glob(f"{_SAVED}/{_ANY_RANK}"), None) is None:
        return _newest(path) / _SAVED
    if (path / _BEGUN).is_file() and not (path / _DONE).is_file():
        raise ConfigError(
            f"it has {_BEGUN} but no {_DONE}, so NxD had not finished it; if it had, as one that "
            f"was saved asynchronously just before the run ended: touch {path / _DONE}"
        )
    return path / _SAVED


def ranks(folder: Path) -> list[list[str]]:
    """Names of the ranks' files: for each pipeline stage those of its tensor-parallel ranks.

    Raises:
        ConfigError: Files are missing, or are those of another kind of model.
    """
    names = sorted(path.name for path in folder.glob(_ANY_RANK) if not path.match("*.info.pt"))
    found = {name: match for name in names if (match := _RANK.fullmatch(name))}
    if strange := [name for name in names if name not in found]:
        raise ConfigError(
            f"{strange[0]} is no file of a rank of a dense model, as "
            "dp_rank_00_tp_rank_00_pp_rank_00.pt is"
        )
    by_rank = {(int(match[2]), int(match[1])): name for name, match in found.items()}
    stages, tp = (1 + max(rank[axis] for rank in by_rank) for axis in (0, 1))
    wanted = [[(stage, rank) for rank in range(tp)] for stage in range(stages)]
    lost = [place for stage in wanted for place in stage if place not in by_rank]
    if lost:
        stage, rank = lost[0]
        raise ConfigError(
            f"it has files of {tp} tensor-parallel ranks in {stages} pipeline stages, but no "
            f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
        )
    return [[by_rank[place] for place in stage] for stage in wanted]


def _newest(path: Path) -> Path:
    """The tag that is both the last by its numbers and the last that was written."""
    tags = sorted({file.parents[1] for file in path.glob(f"*/{_SAVED}/{_ANY_RANK}")})
    done = [tag for tag in tags if (tag / _DONE).is_file()]
    if not done:
        raise ConfigError(
            f"none of its tags has {_DONE}, so NxD had finished none; name one: {_named(tags)}"
        )
    by_number = max(done, key=lambda tag: [int(digits) for digits in re.findall(r"\d+", tag.name)])
    by_time = max(done, key=lambda tag: (tag / _DONE).stat().st_mtime)
    if by_number != by_time:
        raise ConfigError(
            f"its tag {by_number.name} has the highest number, {by_time.name} was written last; "
            f"name the one that is meant: {_named([by_number, by_time])}"
        )
    return by_number


def _named(tags: list[Path]) -> str:
    return " or ".join(f"model.init_from={tag}" for tag in tags)
