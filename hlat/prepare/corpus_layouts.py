"""Directory layouts of published corpora: which files belong to which source.

The directories of a published corpus are not named after its sources, and also contain other
splits and lists. A layout maps the files to the sources of a data configuration.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from hlat.config.config_errors import ConfigError
from hlat.prepare.file_formats import is_data_file
from hlat.storage.data_file import DataFile


class CorpusLayout(NamedTuple):
    """Directory layout of a published corpus."""

    config: str
    """Configuration of the group `data` that reads the sources."""
    sources: Mapping[str, tuple[str, ...]]
    """Patterns that match the end of the file paths of each source."""


# The layouts are those of the repositories on huggingface.co; RedPajama's results from the loop
# over urls.txt in its card. Of peS2o's overlapping versions, the second is used.
LAYOUTS = {
    "redpajama": CorpusLayout(
        "redpajama",
        {
            "common_crawl": ("common_crawl/*/*.jsonl*",),
            "c4": ("c4/*.jsonl*",),
            "github": ("github/*.jsonl*",),
            "arxiv": ("arxiv/*.jsonl*",),
            "books": ("book/*.jsonl*",),
            "wikipedia": ("wikipedia/*.jsonl*",),
            "stackexchange": ("stackexchange/*.jsonl*",),
        },
    ),
    "pes2o": CorpusLayout("hlat_70b", {"pes2o": ("v2/train-*.json*", "v2/train-*.zst")}),
    "open_web_math": CorpusLayout("hlat_70b", {"open_web_math": ("train-*.parquet",)}),
}


def assign_sources(
    name: str, inputs: Iterable[DataFile]
) -> tuple[dict[str, list[DataFile]], list[DataFile]]:
    """Return the files of each source of a layout that has any, and the unmatched data files.

    Raises:
        ConfigError: If no file matches.
    """
    sources = LAYOUTS[name].sources
    assigned: dict[str, list[DataFile]] = {source: [] for source in sources}
    unmatched: list[DataFile] = []
    for file in inputs:
        path = PurePosixPath(file.location)
        matches = [source for source, ends in sources.items() if any(map(path.match, ends))]
        (assigned[matches[0]] if matches else unmatched).append(file)
    if not any(assigned.values()):
        patterns = ", ".join(pattern for ends in sources.values() for pattern in ends)
        raise ConfigError(
            f"layout={name}: none of {len(unmatched)} files, such as {unmatched[0].location}, "
            f"matches {patterns}; specify the directory of the corpus, or omit layout="
        )
    data = [file for file in unmatched if is_data_file(file.location)]
    return {source: files for source, files in assigned.items() if files}, data
