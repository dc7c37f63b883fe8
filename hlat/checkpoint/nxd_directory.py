"""Directories of neuronx-distributed (NxD) checkpoints: tags and rank files."""

import re
from pathlib import Path

from hlat.config.config_errors import ConfigError

_RANK_FILE = re.compile(r"dp_rank_00_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
_RANK_FILE_GLOB = "dp_rank_*.pt"
_MODEL_DIR = "model"
"""Directory of the model in a tag, beside that of the optimizer."""
_STARTED_MARKER, _DONE_MARKER = "checkpoint", "done"
"""Files that NxD writes before and after it saves a tag; its converter writes neither."""


def is_nxd_checkpoint(path: Path) -> bool:
    """Return True for a tag, a directory of tags, or the model directory of a tag."""
    parents = ("", f"{_MODEL_DIR}/", f"*/{_MODEL_DIR}/")
    return any(next(path.glob(parent + _RANK_FILE_GLOB), None) is not None for parent in parents)


def find_model_dir(path: Path) -> Path:
    """Return the directory of the rank files, by default that of the newest complete tag.

    Raises:
        ConfigError: If no tag is complete, the given tag is incomplete, or the newest is ambiguous.
    """
    if next(path.glob(_RANK_FILE_GLOB), None) is not None:
        return path
    if next(path.glob(f"{_MODEL_DIR}/{_RANK_FILE_GLOB}"), None) is None:
        return _find_newest_tag(path) / _MODEL_DIR
    if (path / _STARTED_MARKER).is_file() and not (path / _DONE_MARKER).is_file():
        raise ConfigError(
            f"it has {_STARTED_MARKER} but no {_DONE_MARKER}, so NxD had not finished it; if the "
            "save was asynchronous and finished just before the run ended: touch "
            f"{path / _DONE_MARKER}"
        )
    return path / _MODEL_DIR


def list_rank_files(model_dir: Path) -> list[list[str]]:
    """Return the names of the rank files by pipeline stage and tensor-parallel rank.

    Raises:
        ConfigError: If files are missing, or belong to another kind of model.
    """
    names = sorted(p.name for p in model_dir.glob(_RANK_FILE_GLOB) if not p.match("*.info.pt"))
    by_rank = {}
    for name in names:
        match = _RANK_FILE.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{name} is not a rank file of a dense model, such as "
                "dp_rank_00_tp_rank_00_pp_rank_00.pt"
            )
        by_rank[int(match[2]), int(match[1])] = name
    num_stages, tp = (1 + max(rank[axis] for rank in by_rank) for axis in (0, 1))
    stages = [[(stage, rank) for rank in range(tp)] for stage in range(num_stages)]
    if missing := [key for stage in stages for key in stage if key not in by_rank]:
        stage, rank = missing[0]
        raise ConfigError(
            f"it has files of {tp} tensor-parallel ranks in {num_stages} pipeline stages, but no "
            f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
        )
    return [[by_rank[key] for key in stage] for stage in stages]


def _find_newest_tag(path: Path) -> Path:
    """Return the complete tag with both the highest number and the latest modification time."""
    tags = sorted({file.parents[1] for file in path.glob(f"*/{_MODEL_DIR}/{_RANK_FILE_GLOB}")})
    done = [tag for tag in tags if (tag / _DONE_MARKER).is_file()]
    if not done:
        raise ConfigError(
            f"none of its tags has {_DONE_MARKER}, so NxD had finished none; specify one: "
            f"{_format_tags(tags)}"
        )
    by_number = max(done, key=lambda tag: [int(digits) for digits in re.findall(r"\d+", tag.name)])
    by_time = max(done, key=lambda tag: (tag / _DONE_MARKER).stat().st_mtime)
    if by_number != by_time:
        raise ConfigError(
            f"its tag {by_number.name} has the highest number, {by_time.name} was written last; "
            f"specify one: {_format_tags([by_number, by_time])}"
        )
    return by_number


def _format_tags(tags: list[Path]) -> str:
    return " or ".join(f"model.init_from={tag}" for tag in tags)
