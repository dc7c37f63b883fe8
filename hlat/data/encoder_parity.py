"""Comparison of the fast encoder with the reference before its first use with a tokenizer.

Agreement of two libraries depends on the tokenizer and both versions, so it is tested on far more
texts than a run reads, and the result is cached. Code points on which the libraries differ (their
Unicode versions differ) are encoded by the reference; any other difference is an error.
"""

import contextlib
import hashlib
import itertools
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tqdm import tqdm

from hlat.config.config_errors import ConfigError
from hlat.data import encoder_test_texts
from hlat.data.data_cache import get_cache_dir, open_progress_bar, replace_file
from hlat.data.token_encoders import (
    FastEncoder,
    FastEncoderWithFallback,
    TokenEncoder,
    get_fast_library_version,
)

COMPARISON_VERSION = 2
"""Incremented when the comparison is extended, which invalidates cached results."""
MAX_DIFFERING_CODE_POINTS = 1 << 16
"""Maximum number of code points that the reference encodes instead of the fast encoder."""

T = TypeVar("T")

_CODE_POINTS_PER_TEXT = 64
_TEXTS_PER_BATCH = 256


@dataclass(frozen=True)
class EncoderParity:
    """Result of a comparison."""

    unlike: tuple[tuple[int, int], ...]
    """Ranges (first, last) of code points on which the encoders differ."""
    difference: str
    """Description of the first difference with another cause; empty if there is none."""


@dataclass(frozen=True)
class EncoderTestInputs:
    """Inputs of a comparison."""

    texts: Sequence[str]
    code_points: Sequence[int] = ()
    compositions: Sequence[str] = ()


def build_verified_encoder(
    name: str, content: bytes, reference: TokenEncoder, added_tokens: Iterable[str]
) -> FastEncoderWithFallback:
    """Build a fast encoder with the ids of the reference.

    Raises:
        ConfigError: If the fast library is missing, does not support the tokenizer, or differs.
    """
    fast = FastEncoder(name, content)
    file = _get_cache_file(content)
    parity = _load_parity(file)
    if parity is None:
        inputs = build_test_inputs(added_tokens)
        parity = compare_encoders(fast, reference, inputs, f"data.tokenizer={name}")
        _save_parity(file, parity)
    if parity.difference:
        raise ConfigError(
            f"data.encoder=fast does not give the ids of the reference for data.tokenizer={name}: "
            f"{parity.difference}; set data.encoder=reference"
        )
    return FastEncoderWithFallback(fast, reference, parity.unlike)


def build_test_inputs(added_tokens: Iterable[str]) -> EncoderTestInputs:
    """Return all code points and thousands of real and generated texts."""
    texts = [
        *encoder_test_texts.generate_token_spellings(added_tokens),
        *encoder_test_texts.generate_texts(),
        *encoder_test_texts.read_embedded_texts(),
    ]
    code_points = [*itertools.chain(*encoder_test_texts.CODE_POINTS)]
    return EncoderTestInputs(texts, code_points, [*encoder_test_texts.generate_compositions()])


def compare_encoders(
    fast: FastEncoder, reference: TokenEncoder, inputs: EncoderTestInputs, label: str
) -> EncoderParity:
    """Encode the same inputs with both encoders."""
    count = len(inputs.texts) + len(inputs.code_points)
    label = f"comparing the fast encoder with the reference for {label}"
    with open_progress_bar(label, total=count) as progress:
        points = inputs.code_points
        differing, suspects = _find_differing_code_points(fast, reference, points, progress)
        # Of a composition, the code point of the newest Unicode version is excluded
        compositions = _find_differing_texts(fast, reference, inputs.compositions)
        differing |= {max(map(ord, parts)) for parts in compositions}
        if differing and min(differing) < 0x80:
            text = encoder_test_texts.wrap_code_point(min(differing))
            return EncoderParity((), _format_difference(text, fast, reference))
        if len(differing) > MAX_DIFFERING_CODE_POINTS:
            return EncoderParity((), f"it reads {len(differing)} code points differently")
        ranges = _merge_ranges(sorted(differing))
        encoder = FastEncoderWithFallback(fast, reference, ranges)
        for batch in _split_batches([*suspects, *inputs.texts], _TEXTS_PER_BATCH):
            for text in _find_differing_texts(encoder, reference, batch):
                return EncoderParity(ranges, _format_difference(text, encoder, reference))
            progress.update(len(batch))
    return EncoderParity(ranges, "")


def _find_differing_code_points(
    fast: TokenEncoder, reference: TokenEncoder, code_points: Sequence[int], progress: "tqdm[Any]"
) -> tuple[set[int], list[str]]:
    """Return the differing code points and texts that may differ for another reason.

    Many code points are tested in one text, which is twice as fast; those of a differing text are
    tested individually.
    """
    wrap = encoder_test_texts.wrap_code_point
    differing: set[int] = set()
    suspects: list[str] = []
    groups = list(_split_batches(code_points, _CODE_POINTS_PER_TEXT))
    for batch in _split_batches(groups, _TEXTS_PER_BATCH):
        points_by_text = {"".join(map(wrap, points)): points for points in batch}
        for text in _find_differing_texts(fast, reference, list(points_by_text)):
            texts = {point: wrap(point) for point in points_by_text[text]}
            failed = _find_differing_texts(fast, reference, list(texts.values()))
            differing |= {point for point in texts if texts[point] in failed}
            suspects.append("".join(t for t in texts.values() if t not in failed))
        progress.update(sum(map(len, batch)))
        if differing and min(differing) < 0x80:
            break  # an error in any case
    return differing, suspects


def _find_differing_texts(
    encoder: TokenEncoder, other: TokenEncoder, documents: Sequence[str]
) -> list[str]:
    """Return the texts for which two encoders return different ids."""
    pairs = zip(documents, encoder.encode(documents), other.encode(documents), strict=True)
    return [text for text, ids, expected in pairs if not np.array_equal(ids, expected)]


def _format_difference(text: str, fast: TokenEncoder, reference: TokenEncoder) -> str:
    """Describe the difference in the ids of the shortest part of a text that has one."""
    text = _shorten_difference(text, fast, reference)
    (ids,), (expected,) = fast.encode([text]), reference.encode([text])
    shorter = min(len(ids), len(expected))
    first = next((i for i in range(shorter) if ids[i] != expected[i]), shorter)
    window = slice(max(0, first - 2), first + 6)
    return (
        f"it encodes {text!r} as {ids[window].tolist()} instead of {expected[window].tolist()} "
        f"(from token {window.start} on)"
    )


def _shorten_difference(text: str, fast: TokenEncoder, reference: TokenEncoder) -> str:
    """Remove characters from both ends while the ids of the rest differ."""
    steps = (len(text) // 2, len(text) // 4, len(text) // 8, 1)
    parts = [part for step in steps if step for part in (text[step:], text[:-step])]
    differing = _find_differing_texts(fast, reference, parts)
    return _shorten_difference(differing[0], fast, reference) if differing else text


def _merge_ranges(code_points: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Merge consecutive ascending code points into ranges."""
    runs = itertools.groupby(enumerate(code_points), lambda item: item[1] - item[0])
    members = ([point for _, point in run] for _, run in runs)
    return tuple((run[0], run[-1]) for run in members)


def _split_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _get_cache_file(content: bytes) -> Path:
    """Return the path of a cached result, with a hash of tokenizer, versions and machine."""
    versions = COMPARISON_VERSION, tokenizers.__version__, get_fast_library_version()
    key = repr((hashlib.sha256(content).hexdigest(), *versions, platform.machine()))
    return get_cache_dir() / "parity" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _load_parity(file: Path) -> EncoderParity | None:
    """Load a cached result if it exists and is valid."""
    try:
        content = json.loads(file.read_bytes())
        ranges = tuple((int(first), int(last)) for first, last in content["unlike"])
        return EncoderParity(ranges, str(content["difference"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save_parity(file: Path, parity: EncoderParity) -> None:
    """Cache a result if the directory is writable."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(asdict(parity)).encode())
