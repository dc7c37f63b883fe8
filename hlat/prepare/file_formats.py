"""Formats of document files, by name and by content.

Many names state no format or a wrong one: `changelog.gz` and `ls.1.gz` are text, and `.json` is one
line per document or one array. The content decides where it is unambiguous, and the name elsewhere.
"""

import codecs
import json
import re
import unicodedata
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from hlat.data.text_column import ARROW_MAGIC, PARQUET_MAGIC
from hlat.prepare.text_blocks import TextBlocks, detect_codec

COMPRESSION_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
TEXT_SUFFIXES = frozenset(
    {
        *(".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html"),
        *(".htm"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh"),
        *(".java", ".kt", ".kts", ".scala", ".groovy", ".clj", ".go", ".rs", ".zig", ".nim"),
        *(".js", ".jsx", ".mjs", ".ts", ".tsx", ".vue", ".svelte", ".css", ".scss", ".rb"),
        *(".php", ".pl", ".pm", ".lua", ".r", ".jl", ".swift", ".m", ".mm", ".cs", ".fs"),
        *(".vb", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".dart", ".lisp", ".el", ".scm"),
        *(".f90", ".f", ".asm", ".s", ".v", ".sv", ".vhd", ".sh", ".bash", ".zsh", ".fish"),
        *(".ps1", ".sql", ".proto", ".thrift", ".cmake", ".mk", ".gradle", ".tf", ".yaml"),
        *(".yml", ".toml", ".ini", ".cfg"),
    }
)
"""Suffixes of prose and source code."""
FILE_FORMATS = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys((".csv", ".tsv"), "table"),
}
SUPPORTED_FORMATS = "text, source code, JSON, Parquet, Arrow (also .gz, .zst, .bz2, .xz)"

HEAD_BYTES = 8000
"""Beginning of a file that determines its format, as in Git's buffer_is_binary."""
_CONTROL_BYTES = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")
"""Bytes that text in no encoding contains (encoding.c of file(1))."""
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins with that of utf-16-le
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_ZIP_MAGIC = b"PK\x03\x04"
_UNREADABLE_FORMATS = {
    "binary": "not text",
    "zip": "a zip archive",
    "table": "a table (write the documents to JSON lines or Parquet)",
}


class FileFormat(NamedTuple):
    """Format of the documents of a file, compression and encoding."""

    name: str
    """`text`, `lines` (JSON lines), `json` (an array, or objects of several lines), `parquet`,
    `arrow`; `binary`, `zip` and `table` contain no documents."""
    codec: str | None = None
    encoding: str = "utf-8"

    @property
    def problem(self) -> str | None:
        """Reason why the file contains no documents, or None."""
        return _UNREADABLE_FORMATS.get(self.name)


def parse_name(path: str) -> tuple[str | None, str | None]:
    """Return format and codec of a file by its name; None: the name does not state it."""
    *_, inner, last = "", "", *PurePosixPath(path).suffixes
    codec = COMPRESSION_CODECS.get(last.lower())
    return FILE_FORMATS.get((inner if codec else last).lower()), codec


def is_data_file(path: str) -> bool:
    """Return True if the name is that of a file with many documents, not of text."""
    name, codec = parse_name(path)
    return name not in ("text", "table") and (name is not None or codec is not None)


def get_suffix(name: str) -> str:
    """Return the suffix of a file name, with that before the suffix of a codec."""
    suffixes = PurePosixPath(name).suffixes
    count = 2 if suffixes and suffixes[-1].lower() in COMPRESSION_CODECS else 1
    return "".join(suffixes[-count:]).lower() or "no suffix"


def detect_format(file: Any, path: str) -> FileFormat:
    """Return the format of an open file by its name and content."""
    return open_blocks(file, path, HEAD_BYTES)[0]


def open_blocks(
    file: Any, path: str, block_bytes: int | None = None
) -> tuple[FileFormat, TextBlocks]:
    """Return the format of an open file by its name and content, and the content.

    `block_bytes` is the size of a block of the content.
    """
    name, codec_of_name = parse_name(path)
    head = file.read(HEAD_BYTES)
    codec = detect_codec(head)
    if codec is None and codec_of_name and (not head or _detect_encoding(head) is None):
        codec = codec_of_name  # empty or damaged
    blocks = TextBlocks(file, codec, block_bytes)
    if codec:
        head = blocks.peek(HEAD_BYTES)[:HEAD_BYTES]
    detected = _detect_content(head, name)
    blocks.encoding = detected.encoding
    return detected._replace(codec=codec), blocks


def _detect_content(head: bytes, name: str | None) -> FileFormat:
    """Return the format of a file by its beginning and the format that its name states."""
    if name == "table":
        return FileFormat(name)
    if head.startswith(PARQUET_MAGIC) or name == "parquet":
        return FileFormat("parquet")
    if head.startswith(ARROW_MAGIC) or name == "arrow":
        return FileFormat("arrow")
    encoding = _detect_encoding(head)
    if encoding is None:
        return FileFormat("zip" if head.startswith(_ZIP_MAGIC) else "binary")
    if name != "text":
        name = _detect_json(str(head, encoding, "replace").lstrip("\ufeff \t\r\n"), name)
    return FileFormat(name, encoding=encoding)


def _detect_json(text: str, name: str | None) -> str:
    """Return `lines`, `json` or `text` for a beginning of a file that is JSON by its name or not.

    The first line of JSON lines is complete, and that of an indented object is not.
    """
    line, newline, _ = text.partition("\n")
    if name is None:
        return "lines" if _is_object(line, bool(newline)) else "text"
    is_indented = line.startswith("{") and line.rstrip().endswith(("{", "[", ","))
    return "json" if text.startswith("[") or (newline and is_indented) else "lines"


def _is_object(line: str, is_complete: bool) -> bool:
    """Return True if a line is a JSON object, or may be the beginning of one."""
    if not is_complete and len(line) >= HEAD_BYTES // 4:
        return line.startswith('{"')
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _detect_encoding(head: bytes) -> str | None:
    """Return a Unicode encoding, `utf-8` for any encoding that extends ASCII, or None if binary."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    has_control_bytes = _CONTROL_BYTES.search(head.replace(b"\x00", b"")) is not None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        is_utf8 = True
    except UnicodeDecodeError:
        is_utf8 = False
    if b"\x00" in head:
        is_rare = 4 * head.count(b"\x00") < len(head)  # UTF-16 has one per ASCII character
        is_text_with_nulls = is_utf8 and is_rare and not has_control_bytes
        return None if is_text_with_nulls else _detect_wide_encoding(head)
    return "utf-8" if is_utf8 or not has_control_bytes else None


def _detect_wide_encoding(head: bytes) -> str | None:
    """Return the encoding of UTF-16 or UTF-32 without a byte-order mark, or None.

    The bytes of text in another order are often text as well, but with fewer ASCII characters.
    """
    counts = {}
    for encoding in _BYTE_ORDER_MARKS.values():
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeDecodeError:
            continue
        if all(map(_is_text_character, text)):
            counts[encoding] = sum(map(str.isascii, text))
    best = max(counts, key=lambda encoding: counts[encoding], default=None)
    return best if best and counts[best] else None


def _is_text_character(character: str) -> bool:
    return character in "\t\n\r\f" or unicodedata.category(character) not in ("Cc", "Cn", "Co")
