"""Hypothesis strategies that change a valid file: values of JSON, lines, words and bytes."""

import copy
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

Mutate = Callable[[bytes], SearchStrategy[bytes]]
"""Return the strategy of changed contents of a valid file."""

MAX_CHANGES = 3
_DEEP, _HUGE, _DIGITS = "@deep@", "@huge@", "@digits@"
_RAW_JSON = {_DEEP: "[" * 5000 + "]" * 5000, _HUGE: "1e400", _DIGITS: "9" * 5000}
"""JSON texts that `json.dumps` does not write, by the strings that represent them."""
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.5, -0.5, 1e-300, 1e308, 2**31, 2**63, 10**12, 10**30),
    *(float("inf"), float("-inf"), float("nan"), "", "x", "7", "../x", "/dev/zero", "a\0b"),
    *("\ud800", "\x1b[31m", "${oc.env:PATH}", "é" * 100, _DEEP, _HUGE, _DIGITS),
    *([], [[]], [None], [0], [-1, -1], ["x"], {}, {"x": 1}, {"": {}}),
]
_NUMBERS = [0, 1, -1, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63)]
_WORDS = [
    *("", " ", "=", "~", "+", "++", ".", ",", ":", "/", "@", "|", "{", "}", "[", "]", "(", ")"),
    *("'", '"', "$", "${", "${x}", "${oc.env:X}", "\\", "\n", "\r", "\t", "\0", "\x1b", "#", "*"),
    *("&a", "*a", "!!python/name:os.system", "null", "nan", "1e400", "-1", "0", "9" * 5000, "é"),
    *("\ud800", "../", "[" * 500, "{a: " * 500, "a" * 3000),
]


@st.composite
def mutate_bytes(draw: DrawFn, content: bytes) -> bytes:
    """Change, insert, remove or repeat bytes and integers at random positions."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, MAX_CHANGES))):
        start = draw(st.integers(0, len(changed)))
        length = draw(st.integers(0, 64))
        action = draw(st.sampled_from(("bit", "number", "insert", "remove", "repeat", "cut")))
        if action == "bit" and start < len(changed):
            changed[start] ^= 1 << draw(st.integers(0, 7))
        elif action == "number":
            size = draw(st.sampled_from((1, 2, 4, 8)))
            number = draw(st.sampled_from(_NUMBERS)) % 2 ** (8 * size)
            changed[start : start + size] = number.to_bytes(size, "little")
        elif action == "insert":
            changed[start:start] = draw(st.binary(max_size=64))
        elif action == "remove":
            del changed[start : start + length]
        elif action == "repeat":
            changed[start:start] = changed[start : start + length] * draw(st.integers(1, 20))
        elif action == "cut":
            del changed[start:]
    return bytes(changed)


@st.composite
def mutate_text(draw: DrawFn, content: bytes) -> bytes:
    """Replace, insert, remove or repeat parts of a text, and insert characters with a meaning."""
    text = content.decode()
    for _ in range(draw(st.integers(1, MAX_CHANGES))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        inserted = draw(st.one_of(st.sampled_from(_WORDS), st.text(max_size=8)))
        text = text[:start] + draw(st.sampled_from((inserted, text[start:end] * 2))) + text[end:]
    return text.encode(errors="surrogatepass")


def mutate_json(content: bytes) -> SearchStrategy[bytes]:
    """Change values, keys and elements of a JSON document."""
    return _mutate_document(json.loads(content)).map(_serialize)


@st.composite
def mutate_rows(draw: DrawFn, content: bytes) -> bytes:
    """Change, remove, repeat and truncate the rows of a JSON lines file."""
    rows = content.splitlines()
    for _ in range(draw(st.integers(1, MAX_CHANGES))):
        number = draw(st.integers(0, len(rows) - 1))
        action = draw(st.sampled_from(("json", "json", "json", "text", "remove", "repeat")))
        if action == "json":
            try:
                row = json.loads(rows[number])
            except (ValueError, RecursionError):
                continue
            rows[number] = _serialize(draw(_mutate_document(row)))
        elif action == "text":
            rows[number] = draw(mutate_bytes(rows[number]))
        elif action == "repeat":
            rows.insert(draw(st.integers(0, len(rows))), rows[number])
        elif len(rows) > 1:
            del rows[number]
    return b"\n".join(rows) + draw(st.sampled_from((b"\n", b"", b"\r\n", b"\n\n")))


@st.composite
def mutate_safetensors(draw: DrawFn, content: bytes) -> bytes:
    """Change the header of a safetensors file, with the right length in front of it."""
    length = int.from_bytes(content[:8], "little")
    header = _serialize(draw(_mutate_document(json.loads(content[8 : 8 + length]))))
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


@st.composite
def mutate_with_crc32(draw: DrawFn, content: bytes) -> bytes:
    """Change bytes of a file that ends with the CRC-32 of the rest, and write the right one."""
    body = draw(mutate_bytes(content[:-4]))
    return body + zlib.crc32(body).to_bytes(4, "little")


def either(*mutations: Mutate) -> Mutate:
    """Apply one of several mutations, of which the first ones are structural."""
    return lambda content: st.one_of(*(mutate(content) for mutate in mutations))


@st.composite
def _mutate_document(draw: DrawFn, document: Any) -> Any:
    """Change up to `MAX_CHANGES` values of a JSON document."""
    box = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, MAX_CHANGES))):
        slots = [*_iterate_slots(box)]
        parent, key = draw(st.sampled_from(slots))
        action = draw(st.sampled_from(("value", "value", "copy", "remove", "repeat", "add")))
        value = copy.deepcopy(draw(st.sampled_from(_VALUES)))
        if action == "value":
            parent[key] = value
        elif action == "copy":
            other, other_key = draw(st.sampled_from(slots))
            parent[key] = copy.deepcopy(other[other_key])
        elif parent is box:
            continue
        elif action == "remove":
            del parent[key]
        elif isinstance(parent, list):
            parent[key:key] = (
                copy.deepcopy(parent[key : key + 1]) if action == "repeat" else [value]
            )
        else:
            parent[draw(st.sampled_from(("x", "", "a\0b", "\ud800", f"{key}x")))] = value
    return box[0]


def _iterate_slots(parent: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key or index of all values below it."""
    for key in parent if isinstance(parent, dict) else range(len(parent)):
        yield parent, key
        if isinstance(parent[key], (dict, list)):
            yield from _iterate_slots(parent[key])


def _serialize(document: Any) -> bytes:
    text = json.dumps(document)
    for name, raw in _RAW_JSON.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()
