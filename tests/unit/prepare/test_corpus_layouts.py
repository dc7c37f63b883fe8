"""Files of published corpora are assigned to sources by their paths."""

import pytest

from hlat.config.config_errors import ConfigError
from hlat.prepare import corpus_layouts
from hlat.storage.data_file import DataFile

REDPAJAMA = {
    "arxiv": "arxiv/arxiv_024de5df-1b7f-447c-8c3a-51407d8d6732.jsonl",
    "books": "book/book.jsonl",
    "c4": "c4/c4-train.00857-of-01024.jsonl",
    "common_crawl": "common_crawl/2023-06/en_middle_0104.json.gz.dedup.classifier.jsonl.zst",
    "github": "github/filtered_216883d3a669406699428bc485a4c228.sampled.jsonl",
    "stackexchange": "stackexchange/stackexchange.jsonl",
    "wikipedia": "wikipedia/wiki.jsonl",
}


def _assign(layout: str, *paths: str) -> tuple[dict[str, list[str]], list[str]]:
    given, rest = corpus_layouts.assign_sources(layout, [DataFile(path, 1, "") for path in paths])
    return {name: [one.location for one in files] for name, files in given.items()}, [
        one.location for one in rest
    ]


@pytest.mark.parametrize("root", ["/x/RedPajama-Data-1T", "s3://bucket/c4", "/c4"])
def test_redpajama_directories(root: str) -> None:
    paths = {name: f"{root}/{path}" for name, path in REDPAJAMA.items()}
    given, rest = _assign("redpajama", *paths.values(), f"{root}/meta/x.jsonl")
    assert given == {name: [path] for name, path in paths.items()}
    assert rest == [f"{root}/meta/x.jsonl"]
    assert sorted(given) == sorted(corpus_layouts.LAYOUTS["redpajama"].sources)


def test_pes2o_has_training_files_of_one_version_only() -> None:
    train = "/x/peS2o/data/v2/train-00000-of-00020.json.gz"
    other = [
        "/x/peS2o/data/v2/validation-00000-of-00002.json.gz",
        "/x/peS2o/data/v1/train-0.json.gz",
    ]
    assert _assign("pes2o", train, *other) == ({"pes2o": [train]}, other)


def test_open_web_math() -> None:
    path = "/x/open-web-math/data/train-00000-of-00114-5c9fd2e16dfbb2f5.parquet"
    assert _assign("open_web_math", path) == ({"open_web_math": [path]}, [])


def test_unknown_directory_tree_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"none of 1 files, such as /x/a.jsonl, matches .*c4/\*"):
        _assign("redpajama", "/x/a.jsonl")
    with pytest.raises(ConfigError, match="none"):
        _assign("pes2o", "/x/a.jsonl")


def test_layouts_write_the_sources_of_their_configurations(compose) -> None:
    for layout in corpus_layouts.LAYOUTS.values():
        data = compose(f"data={layout.config}").data
        for name in layout.sources:
            assert list(data.sources[name].paths) == [name]
