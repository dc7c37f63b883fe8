"""Whether the fast encoder may stand in for the reference, found out by comparing them.

That two libraries agree is a claim about one tokenizer and one version of each. It is therefore
tested before the fast one encodes for the first time, on far more than a run will show it, and the
answer is kept beside the embedded corpus. Code points that the two read differently (each library
brings the Unicode of its day) are listed and left to the reference; any other difference refuses
the fast encoder.
"""

import contextlib
import hashlib
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tqdm import tqdm

from hlat.config.errors import ConfigError
from hlat.data import embedded, probes
from hlat.data.encoder import ExactEncoder, FastEncoder, PieceEncoder, fast_version

GATE = 1
"""Version of the comparison; raised when it compares more, so that it is made again."""
MOST_UNLIKE = 1 << 16
"""Code points that may be left to the reference; a tokenizer with more is read otherwise."""

T = TypeVar("T")

_POINTS_PER_TEXT = 64
_TEXTS_PER_BATCH = 256


@dataclass(frozen=True)
class Parity:
    """The outcome of a comparison."""

    unlike: tuple[tuple[int, int], ...]
    """Ranges (first, last) of code points that the encoders read differently."""
    difference: str
    """The first difference that those do not explain, in words; empty if there is none."""


@dataclass(frozen=True)
class Probes:
    """What two encoders are compared on."""

    texts: Sequence[str]
    code_points: Sequence[int] = ()
    compositions: Sequence[str] = ()


def admit(
    name: str, content: bytes, reference: PieceEncoder, written: Iterable[str]
) -> ExactEncoder:
    """Return an encoder that is fast and gives the ids of the reference.

    Args:
        name: What `data.tokenizer` says, for messages.
        content: The tokenizer.json.
        reference: Encoder that defines the ids.
        written: Tokens of the tokenizer that documents may spell out.

    Raises:
        ConfigError: If the fast library is missing, does not know such a tokenizer, or differs.
    """
    fast = FastEncoder(name, content)
    file = _cache_file(content)
    parity = _read(file)
    if parity is None:
        parity = compare(fast, reference, all_probes(written), f"data.tokenizer={name}")
        _write(file, parity)
    if parity.difference:
        raise ConfigError(
            f"data.encoder=fast does not give the ids of the reference for data.tokenizer={name}: "
            f"{parity.difference}; set data.encoder=reference"
        )
    return ExactEncoder(fast, reference, parity.unlike)


def all_probes(written: Iterable[str]) -> Probes:
    """Every code point, and thousands of texts, real and made up."""
    texts = [*probes.written_tokens(written), *probes.generated_texts(), *probes.real_texts()]
    code_points = [*itertools.chain(*probes.CODE_POINTS)]
    return Probes(texts, code_points, [*probes.compositions()])


def compare(fast: FastEncoder, reference: PieceEncoder, compared: Probes, label: str) -> Parity:
    """Encode the same texts with both encoders.

    Args:
        fast: The encoder in question.
        reference: The encoder that defines the ids.
        compared: Code points, each encoded in context, and texts.
        label: What is compared, for the progress bar.
    """
    count = len(compared.texts) + len(compared.code_points)
    label = f"comparing the fast encoder with the reference for {label}"
    interactive = sys.stderr.isatty()
    if not interactive:
        print(f"{label} ...", file=sys.stderr, flush=True)
    with tqdm(total=count, desc=label, disable=not interactive) as progress:
        unlike, suspects = _find_unlike(fast, reference, compared.code_points, progress)
        unlike |= _find_rarest(_differing(fast, reference, compared.compositions))
        ranges = _make_ranges(sorted(unlike))
        if unlike and min(unlike) < 0x80:
            return Parity((), _describe(probes.in_context(min(unlike)), fast, reference))
        if len(unlike) > MOST_UNLIKE:
            return Parity((), f"it reads {len(unlike)} code points differently")
        exact = ExactEncoder(fast, reference, ranges)
        for batch in _batches([*suspects, *compared.texts], _TEXTS_PER_BATCH):
            for text in _differing(exact, reference, batch):
                return Parity(ranges, _describe(text, exact, reference))
            progress.update(len(batch))
    return Parity(ranges, "")


def _find_unlike(
    fast: PieceEncoder, reference: PieceEncoder, code_points: Sequence[int], progress: "tqdm[Any]"
) -> tuple[set[int], list[str]]:
    """Code points that differ in context, and texts that differ for another reason, if any.

    Many stand in one text, which is twice as fast; only those of texts that differ are tried alone.
    """
    unlike: set[int] = set()
    suspects: list[str] = []
    for batch in _batches(list(_batches(code_points, _POINTS_PER_TEXT)), _TEXTS_PER_BATCH):
        points_of = {"".join(map(probes.in_context, points)): points for points in batch}
        for text in _differing(fast, reference, list(points_of)):
            points = points_of[text]
            alone = _differing(fast, reference, [probes.in_context(point) for point in points])
            found = {point for point in points if probes.in_context(point) in alone}
            rest = [point for point in points if point not in found]
            suspects.append("".join(map(probes.in_context, rest)))
            unlike |= found
        progress.update(sum(map(len, batch)))
        if unlike and min(unlike) < 0x80:
            break  # refused whatever else there is
    return unlike, suspects


def _find_rarest(compositions: Iterable[str]) -> set[int]:
    """Of each composition the part that fewest texts contain: the newest, by its number."""
    return {max(map(ord, parts)) for parts in compositions}


def _differing(one: PieceEncoder, other: PieceEncoder, texts: Sequence[str]) -> list[str]:
    """The texts of which two encoders make different ids."""
    pairs = zip(texts, one.encode(texts), other.encode(texts), strict=True)
    return [text for text, ids, expected in pairs if not np.array_equal(ids, expected)]


def _describe(text: str, fast: PieceEncoder, reference: PieceEncoder) -> str:
    """Say how the ids of a text differ, by as short a part of it as still shows it."""
    text = _shorten(text, fast, reference)
    (ids,), (expected,) = fast.encode([text]), reference.encode([text])
    shorter = min(len(ids), len(expected))
    first = next((i for i in range(shorter) if ids[i] != expected[i]), shorter)
    window = slice(max(0, first - 2), first + 6)
    return (
        f"it encodes {text!r} as {ids[window].tolist()} instead of {expected[window].tolist()} "
        f"(from token {window.start} on)"
    )


def _shorten(text: str, fast: PieceEncoder, reference: PieceEncoder) -> str:
    """Cut pieces off either end for as long as what remains differs."""
    steps = (len(text) // 2, len(text) // 4, len(text) // 8, 1)
    parts = [part for step in steps if step for part in (text[step:], text[:-step])]
    differing = _differing(fast, reference, parts)
    return _shorten(differing[0], fast, reference) if differing else text


def _make_ranges(points: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Join ascending code points that follow each other."""
    ranges: list[tuple[int, int]] = []
    for point in points:
        first = point
        if ranges and ranges[-1][1] == point - 1:
            first, _ = ranges.pop()
        ranges.append((first, point))
    return tuple(ranges)


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _cache_file(content: bytes) -> Path:
    """Where the outcome of a comparison lies: its name says what was compared, and where."""
    versions = (GATE, tokenizers.__version__, fast_version(), platform.machine())
    key = repr((hashlib.sha256(content).hexdigest(), *versions))
    return embedded.cache_folder() / "parity" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _read(file: Path) -> Parity | None:
    """An earlier outcome, if there is one that can be read."""
    try:
        found = json.loads(file.read_bytes())
        unlike = tuple((int(first), int(last)) for first, last in found["unlike"])
        return Parity(unlike, str(found["difference"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, parity: Parity) -> None:
    """Keep an outcome; where nothing can be written, the next run compares again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=file.parent) as folder:
            written = Path(folder) / file.name
            written.write_text(json.dumps(asdict(parity)))
            os.replace(written, file)
