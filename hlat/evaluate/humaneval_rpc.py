"""Remote procedure calls from HumanEval's tests to a generated program, as lines of JSON.

The source of this file is a part of both programs, so that it imports only the standard library.
Only plain data is transferred: an object that compares equal to everything raises an error.
"""

import builtins
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

MAX_LINE_LENGTH = 1 << 22
_CONTAINERS: dict[str, type[Any]] = {c.__name__: c for c in (list, tuple, set, frozenset)}


def encode_value(value: Any) -> Any:
    """Return plain data, also of subclasses, in a form that JSON supports.

    Raise TypeError if the value contains other objects.
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
    for name, container in _CONTAINERS.items():
        if isinstance(value, container):
            return {name: [encode_value(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode_value(encoded: Any) -> Any:
    """Return the value of `encode_value`'s result."""
    if not isinstance(encoded, dict):
        return encoded
    ((name, content),) = encoded.items()
    if name == "int":
        return int(content, 16)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "dict":
        return {decode_value(key): decode_value(item) for key, item in content}
    return _CONTAINERS[name](decode_value(item) for item in content)


class PipeChannel:
    """Connection to the other program through the file descriptors of the sandbox."""

    def __init__(self) -> None:
        reader, writer = (int(fd) for fd in sys.argv[2:])
        self._reader = open(reader, encoding="utf-8")  # noqa: SIM115  until the process exits
        self._writer = open(writer, "w", encoding="utf-8")  # noqa: SIM115

    def send(self, message: Any) -> None:
        """Send a message."""
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()

    def receive(self) -> Any:
        """Wait for a message; raise EOFError if there is none or it is too long."""
        line = self._reader.readline(MAX_LINE_LENGTH)
        if not line.endswith("\n"):
            raise EOFError(
                "the program ended, or its message was too long, before the end of the tests"
            )
        return json.loads(line)


def call_remote(channel: PipeChannel, *args: Any, **kwargs: Any) -> Any:
    """Call the function of the other program, and return its result or raise its exception."""
    channel.send([encode_value(args), encode_value(kwargs)])
    return _unwrap_outcome(channel.receive())


def execute_tests(prompt: str, test: str, name: str, passed_exit_code: int) -> None:
    """Run tests against the function of the other program, and exit with a code if they pass.

    Tests may call the function by its name, and use definitions of the prompt.
    """
    channel = PipeChannel()
    _unwrap_outcome(channel.receive())  # raises an exception of the function's definition
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(_complete_prompt(prompt), "prompt", "exec"), namespace)  # noqa: S102  HumanEval's
    namespace[name] = partial(call_remote, channel)
    exec(compile(test, "test", "exec"), namespace)  # noqa: S102
    namespace["check"](namespace[name])
    sys.exit(passed_exit_code)


def serve_calls(channel: PipeChannel, program: str, name: str) -> None:
    """Execute a program, and call its function for each message, until the other program ends."""
    namespace: dict[str, Any] = {"__name__": "program"}

    def define() -> None:
        exec(compile(program, "completion", "exec"), namespace)  # noqa: S102  in a sandbox
        namespace[name]

    channel.send(_capture_outcome(define))
    while True:
        args, kwargs = channel.receive()
        call = partial(namespace[name], *decode_value(args), **decode_value(kwargs))
        channel.send(_capture_outcome(call))


def _complete_prompt(prompt: str) -> str:
    """Return a prompt as a valid program; a docstring is already a function body."""
    try:
        compile(prompt, "prompt", "exec")
    except SyntaxError:
        return f"{prompt}\n    pass\n"
    return prompt


def _capture_outcome(fn: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"returned": encode_value(fn())}
    except BaseException as error:
        return {"raised": type(error).__name__, "text": str(error)[:1000]}


def _unwrap_outcome(outcome: dict[str, Any]) -> Any:
    if "raised" not in outcome:
        return decode_value(outcome["returned"])
    exception = getattr(builtins, outcome["raised"], None)
    if isinstance(exception, type) and issubclass(exception, Exception):
        raise exception(outcome["text"])
    raise RuntimeError(f"{outcome['raised']}: {outcome['text']}")
