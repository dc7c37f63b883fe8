"""Record the calls of named functions in every Python process with this directory on PYTHONPATH.

HLAT_TEST_TRACE names a JSON file {"output": FILE, "functions": {SOURCE: [NAME, ...]}}. Each call
appends "TIME SOURCE NAME" to the output. With HLAT_TEST_KILL=FUNCTION:FILE, a process kills itself
when it calls this function, unless the file exists.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

_trace = json.loads(Path(os.environ["HLAT_TEST_TRACE"]).read_text())
_output = os.open(_trace["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_names = {file: frozenset(names) for file, names in _trace["functions"].items()}
_kill_at, _, _killed = os.environ.get("HLAT_TEST_KILL", "::").partition(":")


def _record(frame, event, _argument):
    code = frame.f_code
    if event != "call":
        return
    if code.co_name in _names.get(code.co_filename, ()):
        line = f"{time.monotonic_ns()} {code.co_filename} {code.co_name}\n"
        os.write(_output, line.encode())
    if code.co_name == _kill_at and not Path(_killed).exists():
        Path(_killed).touch()
        os.kill(os.getpid(), signal.SIGKILL)


threading.setprofile(_record)
sys.setprofile(_record)
