"""Make the corpora and tokenizers of the benchmark out of text that this machine already has.

Usage: python benchmarks/data/corpus.py SCRATCH [--megabytes 200]

Code (.py), markup (.md, .rst, .html, .txt) and documentation (/usr/share/doc, manual pages) in
shares of 55, 20 and 25 %, taken in an order that paths are hashed to. SCRATCH/corpora gets:

* `long`: the files as they are (of giants, pieces of 400 kB);
* `short`: the same text cut at line ends into documents of about 1 kB;
* `lines`: cut into documents of about 180 bytes;
* `few`: the first 5,000 of the short ones;
* `numbered`: 20,000 documents that repeat their own number, to count those lost and repeated.

SCRATCH/tokenizers gets `bytes` and `pieces`. Nothing of it is committed.
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
CUTS = {"long": 400_000, "short": 1024, "lines": 140}
"""Documents end at the first line end after as many characters."""
LAYOUTS = {"one": 1, "many": 40}
"""Arrow files by layout. Some peers slow down with every file, others share files out to workers
(`datasets` shuffles ten as one, so that two workers need more than ten); each is given its best."""
ROWS_PER_BATCH = 1000
"""Rows of a record batch: what `datasets` writes by default."""
NUM_NUMBERED = 20_000
NUM_FEW = 5_000
REPETITIONS = 16
"""How often a numbered document says its number."""
MARKUP = {".md", ".rst", ".html", ".txt"}


def list_files() -> dict[str, list[Path]]:
    """Files of each kind, in an order that says nothing about where they lay."""
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
    """A file as text, or nothing where it is none."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        text = content.decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    return text if text.strip() and "\0" not in text else None


def read_kind(paths: Iterable[Path], limit: float) -> Iterator[str]:
    """Different texts, until they hold `limit` bytes."""
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


def cut(text: str, least: int) -> Iterator[str]:
    """Pieces of at least `least` characters (the last may be shorter) that end at line ends."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= least:
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def write_arrow(folder: Path, texts: list[str], num_files: int) -> None:
    """Write files in the Arrow stream format, as `datasets` does."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("text", pa.string())])
    for number, part in enumerate(np.array_split(np.arange(len(texts)), num_files)):
        path = folder / f"{number:02}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(part[0], part[-1] + 1, ROWS_PER_BATCH):
                end = min(start + ROWS_PER_BATCH, part[-1] + 1)
                writer.write_batch(pa.record_batch([pa.array(texts[start:end])], schema=schema))


def write_mds(folder: Path, texts: list[str]) -> None:
    """Write the shards that mosaicml-streaming reads, of its default size."""
    with MDSWriter(out=str(folder), columns={"text": "str"}, exist_ok=True) as writer:
        for text in texts:
            writer.write({"text": text})


def describe(texts: list[str]) -> dict[str, float]:
    """Size of a corpus."""
    size = sum(len(text.encode()) for text in texts)
    return {"documents": len(texts), "bytes": size, "mean_bytes": round(size / len(texts), 1)}


def shuffled(texts: list[str]) -> list[str]:
    """Neighbouring pieces of a file apart from each other, as in a corpus of the web."""
    order = np.random.default_rng(1).permutation(len(texts))
    return [texts[i] for i in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--megabytes", type=float, default=200)
    arguments = parser.parse_args()
    limit = arguments.megabytes * 1e6
    kinds = list_files()
    texts = [text for kind in SHARES for text in read_kind(kinds[kind], SHARES[kind] * limit)]
    corpora = {
        name: shuffled([piece for text in texts for piece in cut(text, least)])
        for name, least in CUTS.items()
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
    description = {name: describe(documents) for name, documents in corpora.items()}
    (arguments.scratch / "corpus.json").write_text(json.dumps(description, indent=2) + "\n")
    json.dump(description, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
