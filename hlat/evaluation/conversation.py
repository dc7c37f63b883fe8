"""What a judge and a program that is judged tell each other, a line at a time.

The text of this file is a part of both, so it needs Python's own library alone. Only plain data
crosses: a program that returns an object which claims to equal everything has returned nothing.
"""

import builtins
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

LONGEST_LINE = 1 << 22
_CONTAINERS: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def encode(value: Any) -> Any:
    """Plain data, of whatever subclass, as JSON knows it.

    Raises:
        TypeError: There is something else in it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} is no plain data")


def decode(found: Any) -> Any:
    """What was encoded."""
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    return _CONTAINERS[kind](decode(item) for item in content)


class EndedError(Exception):
    """The other one says nothing any more."""


class Line:
    """What connects this process with the other one."""

    def __init__(self) -> None:
        """Take the descriptors that the sandbox gave."""
        heard, told = (int(number) for number in sys.argv[2:])
        self._heard = open(heard, encoding="utf-8")  # noqa: SIM115  as long as the process
        self._told = open(told, "w", encoding="utf-8")  # noqa: SIM115

    def tell(self, message: Any) -> None:
        """Send a line."""
        self._told.write(json.dumps(message) + "\n")
        self._told.flush()

    def hear(self) -> Any:
        """Wait for a line.

        Raises:
            EndedError: There is none, or it is too long.
        """
        line = self._heard.readline(LONGEST_LINE)
        if not line.endswith("\n"):
            raise EndedError("the program ended, or said too much, before its tests were over")
        return json.loads(line)


def ask(line: Line, *arguments: Any, **named: Any) -> Any:
    """Call the other's function, and return or raise what it does."""
    line.tell([encode(arguments), encode(named)])
    return _outcome(line.hear())


def judge(prompt: str, test: str, name: str, passed: int) -> None:
    """Run tests against the other's function, and end with `passed` if it holds them all.

    Tests may call the function by its name, and what the prompt defines before it.
    """
    line = Line()
    _outcome(line.hear())  # that the function is defined
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(_whole(prompt), "prompt", "exec"), names)  # noqa: S102  a data set's own
    names[name] = partial(ask, line)
    exec(compile(test, "test", "exec"), names)  # noqa: S102
    names["check"](names[name])
    sys.exit(passed)


def serve(line: Line, program: str, name: str) -> None:
    """Define a function by a program, and call it as the other asks."""
    names: dict[str, Any] = {"__name__": "program"}

    def define() -> None:
        exec(compile(program, "completion", "exec"), names)  # noqa: S102  what a sandbox is for
        names[name]

    line.tell(_told(define))
    while True:
        try:
            arguments, named = line.hear()
        except EndedError:
            return
        call = partial(names[name], *decode(arguments), **decode(named))
        line.tell(_told(call))


def _whole(prompt: str) -> str:
    """A prompt as a program: a function of which there is a docstring is one."""
    try:
        compile(prompt, "prompt", "exec")
    except SyntaxError:
        return f"{prompt}\n    pass\n"
    return prompt


def _told(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"returned": encode(call())}
    except BaseException as error:
        return {"raised": type(error).__name__, "text": str(error)[:1000]}


def _outcome(told: dict[str, Any]) -> Any:
    if "raised" not in told:
        return decode(told["returned"])
    kind = getattr(builtins, told["raised"], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        raise kind(told["text"])
    raise RuntimeError(f"{told['raised']}: {told['text']}")
