"""Test of a tokenizer.json in a child process, before this process loads it.

A tokenizer.json can end the process that reads it (a panic or a stack overflow in the Rust
library), take all of its memory, or contain a regular expression that needs exponential time. The
child process has limits for time and memory. A success is recorded in the cache directory, so that
each tokenizer is tested once per machine.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import tokenizers

import hlat
from hlat.config.config_errors import ConfigError
from hlat.data import encoder_parity
from hlat.data.data_cache import get_cache_dir
from hlat.data.tokenizer_probe_process import TIME_LIMIT_SIGNAL
from hlat.distributed.process_signals import block_signals

MAX_TOKENIZER_BYTES = 128 << 20
"""Limit of the size of a tokenizer.json. The largest published ones have about 35 MB."""
CPU_SECONDS = 8
MEMORY_BYTES = 1 << 30
TIMEOUT_S = 60
"""Limit of the time on a clock, for a machine that is busy."""

_PROBE_VERSION = 1
"""Incremented when the test changes, which invalidates earlier results."""
_SINGLE_THREAD_ENV = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
_GRAPHIC_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_TEXTS = (
    *encoder_parity.TEXTS,
    # Regular expressions with exponential time fail slowly after long repetitions
    *("".join(c * 48 for c in order) for order in (_GRAPHIC_ASCII, _GRAPHIC_ASCII[::-1])),
    *(f"{word * 48}\x00" for word in ("a ", "ab", "\n", "é", "木")),
    *(f"{character * 4000}\x00" for character in "a 1"),
)
_PROGRAM = (
    f"import sys; sys.path[0] = {str(Path(hlat.__file__).resolve().parent.parent)!r}; "
    "from hlat.data.tokenizer_probe_process import main; main(*map(int, sys.argv[1:]))"
)
_MAX_SHOWN_CHARACTERS = 300
_REMEDY = "use another tokenizer.json"


def validate_tokenizer(label: str, content: bytes) -> None:
    """Raise ConfigError unless a tokenizer.json loads and encodes texts of many kinds."""
    digest = hashlib.sha256(f"{_PROBE_VERSION} {tokenizers.__version__}\n".encode() + content)
    record = get_cache_dir() / "tokenizers" / digest.hexdigest()[:32]
    if record.is_file():
        return
    if problem := _find_problem(content):
        raise ConfigError(f"{label} {problem[:_MAX_SHOWN_CHARACTERS]}; {_REMEDY}")
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def _find_problem(content: bytes) -> str | None:
    """Run the child process; return why the tokenizer cannot be used, or None."""
    header = json.dumps(_TEXTS).encode() + b"\n"
    with block_signals():
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(CPU_SECONDS), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **_SINGLE_THREAD_ENV},
        )
    with child:
        try:
            output, errors = child.communicate(header + content, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"is not loaded, or does not encode some short texts, within {TIMEOUT_S} s"
        finally:
            child.kill()
    if child.returncode == -TIME_LIMIT_SIGNAL:
        return f"takes more than {CPU_SECONDS} s of computation for some short texts"
    if child.returncode == 0:
        return output.decode(errors="replace").strip() or None
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    status = f"exit code {child.returncode}"
    if child.returncode < 0:
        status = signal.Signals(-child.returncode).name
    return (
        f"ends the process that loads it, within {MEMORY_BYTES:,} bytes of memory ({status}: "
        f"{lines[-1] if lines else 'no output'})"
    )
