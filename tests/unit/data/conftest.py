"""Fixtures: small corpora, and a cache directory for the embedded corpus."""

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig, SourceConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data import data_loader, data_source, embedded_corpus, training_data
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer

EOS, BOS = "<|endoftext|>", "<|begin|>"
WORDS = ["red", "blue", "été", "木"]


def _write_arrow(
    path: Path,
    documents: Sequence[str | None],
    column: str = "text",
    rows_per_batch: int = 7,
    stream: bool = False,
    type_: pa.DataType | None = None,
    compression: str | None = None,
) -> Path:
    """Write an Arrow IPC file with an additional column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"number": range(len(documents)), column: pa.array(documents, type_ or pa.string())}
    )
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with path.open("wb") as file, new(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def _make_documents(name: str, count: int, max_words: int = 60) -> list[str]:
    """Return documents of random lengths that start with a unique prefix."""
    rng = random.Random(name)
    return [
        f"{name} {i}: "
        + " ".join(rng.choices(["red", "blue", "été", "木"], k=rng.randrange(max_words)))
        for i in range(count)
    ]


class Corpora:
    """Three sources in a directory, and configs that read them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.documents: dict[str, list[str | None]] = {}
        self.write("alpha", _make_documents("alpha", 40))
        self.write("beta", _make_documents("beta", 23, max_words=200))
        self.write("gamma", _make_documents("gamma", 61, max_words=20))

    def write(self, name: str, documents: Sequence[str | None]) -> None:
        """Write a source as two files, replacing its previous files."""
        self.documents[name] = list(documents)
        middle = len(documents) // 3
        _write_arrow(self.root / name / "a.arrow", documents[:middle])
        _write_arrow(self.root / name / "b.arrow", documents[middle:], stream=True)

    def data(self, weights: dict[str, float] | None = None, **changes: object) -> DataConfig:
        weights = weights or {"alpha": 0.5, "beta": 0.3, "gamma": 0.2}
        fields: dict[str, object] = {
            "name": "small",
            "root": str(self.root),
            "sources": {name: SourceConfig([name], weight) for name, weight in weights.items()},
            "tokenizer": "embedded",
            "eos_token": EOS,
            "heldout_documents": 3,
            "prefetch": 0,
            "workers": 0,
        }
        return DataConfig(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session", autouse=True)
def _vectorized_permutation() -> Iterator[None]:
    """Permute positions in arrays, also those of small corpora."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_source, "MIN_VECTORIZED_ROWS", 8)
        yield


@pytest.fixture
def write_arrow() -> Callable[..., Path]:
    return _write_arrow


@pytest.fixture
def make_documents() -> Callable[..., list[str]]:
    return _make_documents


@pytest.fixture
def eos() -> str:
    return EOS


@pytest.fixture
def bos() -> str:
    return BOS


@pytest.fixture(scope="session")
def bos_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the embedded tokenizer with the additional special token BOS."""
    content = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8"))
    (token,) = content["added_tokens"]
    content["added_tokens"].append(token | {"id": 4096, "content": BOS})
    path = tmp_path_factory.mktemp("bos") / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    return Corpora(tmp_path)


@pytest.fixture
def open_loader() -> Iterator[Callable[..., data_loader.DataLoader]]:
    """Return `build_data_loader` with small sizes and one stage as defaults."""
    opened: list[data_loader.DataLoader] = []

    def open_(
        data: DataConfig,
        phase: PhaseConfig | None = None,
        batch: BatchConfig | None = None,
        seed: int = 1,
        **ranks: int,
    ) -> data_loader.DataLoader:
        phase = phase or PhaseConfig("constant", [PhaseStage("main")])
        batch = batch or BatchConfig(4, 1, 32)
        opened.append(data_loader.build_data_loader(data, phase, batch, seed, **ranks))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set HLAT_CACHE to a directory of the session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HLAT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def embedded_tokenizer() -> Iterator[None]:
    """Load the embedded tokenizer of data loaders once per session."""

    @functools.cache
    def load_embedded(*arguments: Any) -> Tokenizer:
        return Tokenizer("embedded", ".", *arguments)

    def load(name: str, root: str, *arguments: Any) -> Tokenizer:
        is_embedded = name == "embedded"
        return load_embedded(*arguments) if is_embedded else Tokenizer(name, root, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_data, "Tokenizer", load)
        yield


@pytest.fixture(scope="session")
def embedded_folder(cache: Path) -> Path:
    """Prepare the embedded corpus once per session."""
    return embedded_corpus.prepare_embedded_corpus()
