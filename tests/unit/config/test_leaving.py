"""An entry whose reader has left says nothing more of it; what it had found out stays its exit code."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from hlat.config.arguments import leave

def main():
    {body}

leave(main)
"""


def run(body, read):
    """Exit code and complaints of an entry whose output somebody reads, or nobody any more."""
    out, into = os.pipe()
    if not read:
        os.close(out)
    words = [sys.executable, "-c", PROGRAM.format(body=body)]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        words, env=buffered, stdout=into, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(into)
        said = b""
        while read and (part := os.read(out, 4096)):
            said += part
        _, complaints = process.communicate()
    if read:
        os.close(out)
    return process.returncode, complaints, len(said)


@pytest.mark.parametrize(
    ("body", "with_reader", "without"),
    [
        ("print('x' * 99)", 0, 0),
        ("print('x' * 99); return 2", 2, 2),
        ("print('x' * 99); sys.exit(3)", 3, 3),
        ("print('x' * 99_999, flush=True)", 0, 141),
    ],
)
def test_codes_with_and_without_a_reader(body, with_reader, without):
    code, complaints, said = run(body, read=True)
    assert (code, complaints) == (with_reader, "")
    assert said >= 100
    assert run(body, read=False) == (without, "", 0)
