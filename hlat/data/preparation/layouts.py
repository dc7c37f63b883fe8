"""Which files of a downloaded corpus belong to which source of the configurations that read it.

A published corpus is a tree of folders whose names are not those of its sources, with other splits
and lists in between. A layout knows one such tree, so that what a run reads is one command away.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from hlat.config.errors import ConfigError
from hlat.data.preparation.inputs import Input


@dataclass(frozen=True)
class Layout:
    """The tree of a published corpus."""

    sources: Mapping[str, tuple[str, ...]]
    """For each source, patterns that the paths of its files end with."""
    config: str
    """The choice of `data` that reads the sources."""


# The trees are those of the repositories on huggingface.co; RedPajama's is what the loop over
# urls.txt on its card makes. Of peS2o's versions, which overlap, the second is read.
LAYOUTS = {
    "redpajama": Layout(
        {
            "common_crawl": ("common_crawl/*/*.jsonl*",),
            "c4": ("c4/*.jsonl*",),
            "github": ("github/*.jsonl*",),
            "arxiv": ("arxiv/*.jsonl*",),
            "books": ("book/*.jsonl*",),
            "wikipedia": ("wikipedia/*.jsonl*",),
            "stackexchange": ("stackexchange/*.jsonl*",),
        },
        config="redpajama",
    ),
    "pes2o": Layout(
        {"pes2o": ("v2/train-*.json*", "v2/train-*.zst")},
        config="hlat_70b",
    ),
    "open_web_math": Layout(
        {"open_web_math": ("train-*.parquet",)},
        config="hlat_70b",
    ),
}


def assign(name: str, inputs: Iterable[Input]) -> tuple[dict[str, list[Input]], list[Input]]:
    """Give each input to its source.

    Args:
        name: A key of LAYOUTS.
        inputs: What was found.

    Returns:
        The inputs of each source that has any, and those that are of no source.

    Raises:
        ConfigError: If none is of any source.
    """
    sources = LAYOUTS[name].sources
    given: dict[str, list[Input]] = {source: [] for source in sources}
    rest: list[Input] = []
    for one in inputs:
        path = PurePosixPath(one.path)
        owners = [source for source, ends in sources.items() if any(map(path.match, ends))]
        (given[owners[0]] if owners else rest).append(one)
    if not any(given.values()):
        patterns = ", ".join(pattern for ends in sources.values() for pattern in ends)
        raise ConfigError(
            f"--layout {name}: none of {len(rest)} files, such as {rest[0].path}, is one of "
            f"{patterns}; name the corpus's own folder, or leave --layout out"
        )
    return {source: files for source, files in given.items() if files}, rest
