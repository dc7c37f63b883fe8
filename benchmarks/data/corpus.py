"""Write the corpora and tokenizers of the benchmark from files of this machine.

Usage: python benchmarks/data/corpus.py SCRATCH [--megabytes 200]

Code (.py), markup (.md, .rst, .html, .txt) and documentation (/usr/share/doc, manual pages) have
shares of 55, 20 and 25 %. Files are ordered by the hash of their path. Corpora:

* `long`: complete files, or parts of 400 kB;
* `short`: the same text, split at line ends into documents of about 1 kB;
* `lines`: the same text, split into documents of about 180 bytes;
* `few`: the first 5,000 documents of `short`;
* `numbered`: 20,000 documents that repeat their number, to count lost and repeated documents.

Tokenizers: `bytes` and `pieces`. The output is not committed.
"""

import argparse
import gzip
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import no_torchvision  # noqa: F401  (before streaming)
import numpy as np
import pyarrow as pa
from streaming import MDSWriter
from tokenizer_training import train_bytes, train_pieces

SHARES = {"code": 0.55, "markup": 0.20, "documentation": 0.25}
MIN_CHARACTERS = {"long": 400_000, "short": 1024, "lines": 140}
"""Documents end at the first line end after this number of characters."""
LAYOUTS = {"one": 1, "many": 40}
"""Number of Arrow files by layout. Some peers slow down with each file, others distribute files to
workers (`datasets` shuffles ten as one, so that two workers need more than ten)."""
ROWS_PER_BATCH = 1000
"""Rows of a record batch, the default of `datasets`."""
NUM_NUMBERED = 20_000
NUM_FEW = 5_000
REPETITIONS = 16
"""Number of repetitions of the number in a numbered document."""
MARKUP = {".md", ".rst", ".html", ".txt"}


def list_files() -> dict[str, list[Path]]:
    """Return the files of each category, ordered by the hash of their path."""
    libraries = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    files = [path for root in libraries for path in root.rglob("*") if path.is_file()]
    shared = [path for root in ("doc", "man") for path in Path("/usr/share", root).rglob("*")]
    kinds = {
        "code": [path for path in files if path.suffix == ".py"],
        "markup": [path for path in files if path.suffix in MARKUP],
        "documentation": [path for path in shared if path.is_file() and not path.is_symlink()],
    }
    return {
        kind: sorted(set(paths), key=lambda path: hashlib.sha256(str(path).encode()).digest())
        for kind, paths in kinds.items()
    }


def read_text(path: Path) -> str | None:
    """Return the content of a text file, or None for other files."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        text = content.decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    return text if text.strip() and "\0" not in text else None


def read_distinct(paths: Iterable[Path], limit: float) -> Iterator[str]:
    """Yield distinct texts until their total size is `limit` bytes."""
    seen: set[bytes] = set()
    size = 0
    for path in paths:
        text = read_text(path)
        digest = hashlib.sha256((text or "").encode()).digest()
        if text is None or digest in seen:
            continue
        seen.add(digest)
        yield text
        size += len(text.encode())
        if size >= limit:
            return


def split_at_lines(text: str, min_characters: int) -> Iterator[str]:
    """Split a text at line ends into parts of at least `min_characters`, except for the last."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= min_characters:
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def write_arrow(folder: Path, documents: list[str], num_files: int) -> None:
    """Write files in the Arrow stream format, like `datasets`."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("text", pa.string())])
    for number, part in enumerate(np.array_split(np.arange(len(documents)), num_files)):
        path = folder / f"{number:02}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(part[0], part[-1] + 1, ROWS_PER_BATCH):
                end = min(start + ROWS_PER_BATCH, part[-1] + 1)
                rows = pa.array(documents[start:end])
                writer.write_batch(pa.record_batch([rows], schema=schema))


def write_mds(folder: Path, documents: list[str]) -> None:
    """Write shards of mosaicml-streaming with its default size."""
    with MDSWriter(out=str(folder), columns={"text": "str"}, exist_ok=True) as writer:
        for text in documents:
            writer.write({"text": text})


def summarize(documents: list[str]) -> dict[str, float]:
    """Return the number of documents and their size."""
    size, count = sum(len(text.encode()) for text in documents), len(documents)
    return {"documents": count, "bytes": size, "mean_bytes": round(size / count, 1)}


def shuffled(documents: list[str]) -> list[str]:
    """Shuffle documents, because those of a web corpus are not ordered by file."""
    order = np.random.default_rng(1).permutation(len(documents))
    return [documents[i] for i in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--megabytes", type=float, default=200)
    arguments = parser.parse_args()
    limit = arguments.megabytes * 1e6
    kinds = list_files()
    texts = [text for kind in SHARES for text in read_distinct(kinds[kind], SHARES[kind] * limit)]
    corpora = {
        name: shuffled([part for text in texts for part in split_at_lines(text, characters)])
        for name, characters in MIN_CHARACTERS.items()
    }
    corpora["few"] = corpora["short"][:NUM_FEW]
    numbers = [f"{number:07}" for number in range(NUM_NUMBERED)]
    corpora["numbered"] = [" ".join([number] * REPETITIONS) for number in numbers]
    for name, documents in corpora.items():
        for layout, num_files in LAYOUTS.items():
            write_arrow(arguments.scratch / "corpora" / name / layout, documents, num_files)
        write_mds(arguments.scratch / "mds" / name, documents)
    sample = corpora["short"][:: max(1, len(corpora["short"]) // 40_000)]
    train_bytes(arguments.scratch / "tokenizers" / "bytes", sample)
    train_pieces(arguments.scratch / "tokenizers" / "pieces", sample)
    description = {name: summarize(documents) for name, documents in corpora.items()}
    (arguments.scratch / "corpus.json").write_text(json.dumps(description, indent=2) + "\n")
    json.dump(description, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
