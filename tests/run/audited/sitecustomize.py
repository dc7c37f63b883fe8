"""Audit hook for every Python process that has this folder on PYTHONPATH.

Python runs this file at startup, in a trainer as well as in its data workers and ranks. A forbidden
event is written to the file $HLAT_AUDIT and raised; test_audit.py lists the rules. The lists below
contain all exceptions, and why.
"""

import functools
import os
import socket
import sys
from types import CodeType
from typing import Any

import yaml

HERE = os.path.dirname(os.path.realpath(__file__))
REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
TRUSTED = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        sys.prefix,
        sys.base_prefix,
        *(entry for entry in sys.path if os.path.basename(entry) == "site-packages"),
        HERE,
        f"{REPOSITORY}/hlat",
        os.environ["HLAT_AUDIT_LAUNCHERS"],
    )
)
"""Directories with the code of Python, of installed packages and of hlat."""
IMPORTERS = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
COMPOSERS = (
    # Python: functions from the fields that a class declares, annotations, syntax trees
    "collections/__init__.py",
    "dataclasses.py",
    "typing.py",
    "ast.py",
    # attrs, which omegaconf imports if it is there: methods from the fields that a class declares
    "attr/_make.py",
    # sympy and mpmath, which torch imports: names of their functions
    "mpmath/ctx_mp_python.py",
    "sympy/__init__.py",
    "sympy/external/importtools.py",
    # Jinja2: the templates of hlat/report, which no run and no user can change
    "jinja2/environment.py",
    # torch: a template that is filled at import
    "torch/distributed/nn/jit/instantiator.py",
)
"""Files that compile generated source, never the content of a file."""
OWN_PIPES = (
    "multiprocessing/connection.py",
    "multiprocessing/queues.py",
    "multiprocessing/spawn.py",
)
"""Files that unpickle data from a pipe to another process of the same program."""
PROGRAMS = ("git", "uname", os.path.basename(sys.executable))
"""Programs that may be started, none of which is a shell."""
LOCAL_NAMES = (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname())


class ForbiddenError(Exception):
    """Event that hlat must not cause."""


@functools.cache
def trusted(name: str) -> bool:
    """Return True if a file contains installed code."""
    return name.startswith("<frozen ") or os.path.realpath(name).startswith(TRUSTED)


def caller() -> str:
    """Return the file with the code that caused the event; empty for the interpreter itself."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else frame.f_code.co_filename


def may_run(event: str, arguments: tuple[Any, ...], by: str) -> bool:
    """Return True if code may be compiled or run: that of installed files or of a composer."""
    code = arguments[0]
    if by == "" or (trusted(by) and by.endswith(COMPOSERS)):
        return True  # the interpreter runs the file of its command line
    if isinstance(code, CodeType):
        return trusted(code.co_filename)
    return event == "compile" and by in IMPORTERS and trusted(str(arguments[1]))


def may_start(arguments: tuple[Any, ...]) -> bool:
    """Return True if a program may be started; with shell=True it is a shell."""
    return os.path.basename(os.fsdecode(arguments[0])) in PROGRAMS


def is_local(address: Any) -> bool:
    """Return True if the address of a socket is a path or this machine."""
    return isinstance(address, (str, bytes)) or address[0] in LOCAL_NAMES


def allowed(event: str, arguments: tuple[Any, ...], by: str) -> bool:
    """Return True if the event is allowed."""
    if event in ("exec", "compile"):
        return may_run(event, arguments, by)
    if event == "pickle.find_class":
        return trusted(by) and by.endswith(OWN_PIPES)
    if event in ("marshal.loads", "marshal.load"):
        return by in IMPORTERS
    if event == "subprocess.Popen":
        return may_start(arguments)
    if event in ("os.system", "os.exec", "os.posix_spawn", "os.spawn"):
        return False
    if event == "ctypes.dlopen":
        name = arguments[0]
        return name is None or os.sep not in str(name) or trusted(str(name))
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        return is_local(arguments[1])
    if event == "socket.getaddrinfo":
        return arguments[0] in LOCAL_NAMES
    return True


def forbid(message: str) -> None:
    """Write the event to $HLAT_AUDIT and raise ForbiddenError."""
    with open(os.environ["HLAT_AUDIT"], "a") as file:
        file.write(f"{message}\n")
    raise ForbiddenError(message)


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Forbid the event if it is not allowed."""
    by = caller()
    if not allowed(event, arguments, by):
        forbid(f"{event} {str(arguments)[:200]!r} by {by}")


def forbid_objects(self: Any, *arguments: Any) -> None:
    """Replace the lookup of classes and functions in the unsafe loaders of YAML."""
    forbid(f"yaml {str(arguments)[:200]!r}")


WATCHED = {
    "exec", "compile", "pickle.find_class", "marshal.loads", "marshal.load", "subprocess.Popen",
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "ctypes.dlopen", "socket.connect",
    "socket.bind", "socket.sendto", "socket.getaddrinfo",
}  # fmt: skip

for kind in (yaml.constructor.FullConstructor, yaml.constructor.UnsafeConstructor):
    kind.find_python_name = kind.find_python_module = forbid_objects
with open(os.environ["HLAT_AUDIT"] + ".processes", "a") as started:
    started.write(f"{os.getpid()}\n")
sys.addaudithook(lambda event, arguments: watch(event, arguments) if event in WATCHED else None)
