"""Main function of the child process that tests a tokenizer.json.

`hlat.data.tokenizer_probe` starts it with limits for time and memory. Standard input contains the
texts as one line of JSON, then the tokenizer.json. Standard output receives the problem, if any.
"""

import json
import resource
import signal
import sys

import tokenizers

MAX_TOKENS = 1 << 24
"""Limit of token ids; libraries allocate tables of this size."""

TIME_LIMIT_SIGNAL = signal.SIGPROF
"""Signal that ends the process at its time limit. SIGXCPU may come from a scheduler."""
_SHOWN_CHARACTERS = 40


def main(cpu_seconds: int, memory_bytes: int) -> None:
    """Load the tokenizer and encode each text; print the first problem."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    _set_limit(resource.RLIMIT_AS, memory_bytes)
    _set_limit(resource.RLIMIT_CORE, 0)
    texts = json.loads(sys.stdin.buffer.readline())
    if problem := find_problem(sys.stdin.buffer.read(), texts):
        print(problem)


def find_problem(content: bytes, texts: list[str]) -> str | None:
    """Return why a tokenizer.json cannot be used, or None.

    A panic of the library is a BaseException.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:
        version = tokenizers.__version__
        return f"is not a tokenizer.json that the tokenizers library {version} reads ({error})"
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        return "has an empty vocabulary"
    if (largest := max(vocabulary.values())) >= MAX_TOKENS:
        return f"has the token id {largest}; ids must be smaller than {MAX_TOKENS}"
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in texts:
        try:
            tokenizer.encode(text)
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
            tokenizer.decode(encoding.ids, skip_special_tokens=False)
        except BaseException as error:
            shown = ascii(text[:_SHOWN_CHARACTERS])
            return f"cannot encode and decode a text that starts with {shown} ({error})"
    return None


def _set_limit(kind: int, value: int) -> None:
    """Set a limit unless a lower one exists."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or hard > value:
        resource.setrlimit(kind, (value, hard))
