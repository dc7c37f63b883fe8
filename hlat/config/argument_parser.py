"""Command lines of the commands that take paths: positional arguments and `key=value` settings.

All commands share Hydra's override syntax. A setting is declared with argparse as a flag and typed
as an override: `--max-shard-size` is typed `max_shard_size=1GB`, and `--json` is typed `json=true`.
The flag itself is accepted as well.
"""

import argparse
import difflib
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hlat.config.config_errors import ConfigError, ExitCode, escape_control_characters
from hlat.config.override_keys import find_repeated_keys

_EXIT_BROKEN_PIPE = 141
"""Exit code that a shell reports for a program ended by SIGPIPE."""
_EXIT_INTERRUPTED = 130
_PATH_ERRORS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
)
"""Errors of a path that the user can correct."""
_SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_LAUNCHER_PREFIXES = ("hydra/launcher=", "hydra.launcher.", "hydra.sweep.dir=")
"""Prefixes of overrides that choose and configure a launcher, and of its directory."""


def run_and_exit(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the code of `main`; exit silently if the reader closed the pipe, as `| head` does.

    Without this, Python prints a BrokenPipeError in the output or at interpreter exit
    (docs.python.org/3/library/signal.html, note on SIGPIPE).
    """
    code: Any = _EXIT_BROKEN_PIPE
    try:
        try:
            code = main()
        except SystemExit as error:
            code = error.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run_command(
    run: Callable[[], int], output: str | None, interrupted: str = "interrupted"
) -> ExitCode | int:
    """Return the exit code of `run`, with errors printed to standard error.

    The message of an OSError starts with `output` and contains its file name. A path that cannot
    exist or be written is a configuration error. The message after Ctrl-C is `interrupted`.
    """
    try:
        return run()
    except ConfigError as error:
        print("\n".join(f"hlat: {problem}" for problem in error.problems), file=sys.stderr)
        return ExitCode.CONFIGURATION
    except OSError as error:
        return print_os_error(error, output)
    except KeyboardInterrupt:
        print(f"\nhlat: {interrupted}", file=sys.stderr)
        return _EXIT_INTERRUPTED


def print_os_error(error: OSError, output: str | None) -> ExitCode:
    """Print an error about a file and return the exit code; `output` is as for `run_command`."""
    is_wrong_path = error.errno in _PATH_ERRORS
    remedy = "; specify a path that you can read and write" if is_wrong_path else ""
    parts = [output, error.filename, error.strerror or str(error)]
    text = ": ".join(escape_control_characters(str(part)) for part in parts if part)
    print(f"hlat: {text}{remedy}", file=sys.stderr)
    return ExitCode.CONFIGURATION if is_wrong_path else ExitCode.FAILED


class CommandLineParser(argparse.ArgumentParser):
    """Parser of positional arguments and `key=value` settings.

    With `takes_overrides`, other `key=value` words are positional arguments: overrides of the
    configuration. `epilog` contains examples.
    """

    def __init__(
        self, command: str, description: str, epilog: str, takes_overrides: bool = False
    ) -> None:
        super().__init__(
            prog=f"hlat {command}",
            description=description,
            epilog=epilog,
            formatter_class=partial(_HelpFormatter, max_help_position=28),
            allow_abbrev=False,
        )
        self._takes_overrides, self._loads_extensions = takes_overrides, False
        self._optionals.title = "settings"

    def add_model(self) -> None:
        """Add the location of a model, and its checkpoint and tokenizer as settings."""
        model = "run, checkpoint, average or Hugging Face directory"
        self.add_argument("source", metavar="MODEL", help=model)
        step = "checkpoint of the run (default: the newest)"
        self.add_argument("--step", type=int, metavar="N", help=step)
        tokenizer = "the run's tokenizer.json, if it was moved"
        self.add_argument("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
        self.add_ema()
        self.add_extensions()

    def add_ema(self) -> None:
        """Add the selection of the averaged weights."""
        ema = "use the moving average of the weights (optimizer.ema_decay)"
        self.add_argument("--ema", action="store_true", help=ema)

    def add_extensions(self) -> None:
        """Add the files of the user that register the components of a model."""
        files = "Python files with the model's components (docs/guides/own-idea.md)"
        self.add_argument("--extensions", metavar="[FILE,..]", help=files)
        self._loads_extensions = True

    def add_overrides(self, help_text: str) -> None:
        """Add the overrides of a composed configuration, and `--config-dir` as in hlat train."""
        self.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=help_text)
        searched = "also search DIR for choices of groups (docs/guides/own-files.md)"
        self.add_argument("--config-dir", metavar="DIR", help=searched)
        self._loads_extensions = True

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the parsed command line; exit with code 2 if it is wrong.

        Args:
            argv: Words after the command's name; None: those of this process.
        """
        self.usage = self._build_usage()
        typed = sys.argv[1:] if argv is None else argv
        problems = [*filter(None, map(self._find_value_error, typed))]
        if problems := problems or find_repeated_keys(self._list_settings(typed)):
            lines = [f"{self.prog}: {problem}\n" for problem in problems]
            self.exit(ExitCode.CONFIGURATION, "".join(lines))
        if self._loads_extensions:
            self._load_extensions(typed)
        converted = [self._convert_setting(word) for word in typed]
        return self.parse_intermixed_args([word for word in converted if word is not None])

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and `message`, in the syntax of overrides."""
        for action in self._get_settings():
            flag = action.option_strings[-1]
            message = message.replace(f"argument {flag}: ", f"{_format_key(flag)}: ")
            message = re.sub(rf"(?<!\S){flag}(?=,|$)", f"{_format_key(flag)}=", message)
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        hint = self._suggest(unknown) if unknown.startswith("--") else ""
        self.exit(ExitCode.CONFIGURATION, f"{self.prog}: {message}{hint}\n")

    def validate_launcher_overrides(self, words: Sequence[str]) -> None:
        """Exit with code 2 if one of the words does not choose or configure a launcher."""
        for word in words:
            if not is_launcher_override(word):
                self.error_unknown(word)

    def error_unknown(self, word: str) -> NoReturn:
        """Exit with code 2 because `word` is not a setting, and suggest the nearest one."""
        key = word.partition("=")[0]
        self.error(f"{key}= is not a setting of this command{self._suggest(key)}")

    def _load_extensions(self, typed: Sequence[str]) -> None:
        from hlat.config import extensions

        try:
            extensions.load_from_command_line(typed)
        except ConfigError as error:
            self.exit(ExitCode.CONFIGURATION, f"{self.prog}: {error}\n")

    def _get_settings(self) -> list[argparse.Action]:
        return [a for a in self._actions if a.option_strings and "--help" not in a.option_strings]

    def _build_usage(self) -> str:
        forms = {"*": "[{} ...]", "+": "{} ...", "?": "[{}]"}
        words = ["%(prog)s"]
        for action in [action for action in self._actions if not action.option_strings]:
            name = str(action.metavar or "|".join(map(str, action.choices or [action.dest])))
            words.append(forms.get(str(action.nargs), "{}").format(name))
        settings = self._get_settings()
        words += [_format_setting(action) for action in settings if action.required]
        optional = [] if all(action.required for action in settings) else ["[key=value ...]"]
        return " ".join([*words, *optional])

    def _find_value_error(self, word: str) -> str | None:
        """Return the problem of a `key=value` word whose value does not parse."""
        key, equals, value = word.partition("=")
        action = self._option_string_actions.get(f"--{key.replace('_', '-')}")
        if not equals or action is None or action.type is None:
            return None
        assert callable(action.type)
        try:
            action.type(value)
        except argparse.ArgumentTypeError as error:
            return f"{key}: {error}"
        except ValueError:
            return f"{key}: {value} is not of type {getattr(action.type, '__name__', 'value')}"
        return None

    def _list_settings(self, typed: Sequence[str]) -> list[str]:
        """Return the settings of the command among words as `key=value`."""
        words = []
        for word in typed:
            name, equals, value = word.partition("=")
            key = _format_key(name) if name.startswith("--") else name
            is_setting = f"--{key.replace('_', '-')}" in self._option_string_actions
            if is_setting and (equals or name.startswith("--")):
                words.append(f"{key}={value or 'true'}")
        return words

    def _convert_setting(self, word: str) -> str | None:
        """Return `--key=value` for `key=value`, None for `key=false`, other words unchanged."""
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            return word
        flag = f"--{key.replace('_', '-')}"
        action = self._option_string_actions.get(flag)
        if action is None:
            if not self._takes_overrides and not Path(word).exists():
                self.error_unknown(word)
            return word
        if action.nargs != 0:
            return f"{flag}={value}"
        if value not in ("true", "false"):
            self.error(f"{word}: use {key}=true or {key}=false")
        return flag if value == "true" else None

    def list_keys(self) -> list[str]:
        """Return the keys of all settings."""
        return [_format_key(action.option_strings[-1]) for action in self._get_settings()]

    def _suggest(self, flag: str) -> str:
        key, known = _format_key(flag), self.list_keys()
        if near := difflib.get_close_matches(key, known, 1):
            return f"; did you mean {near[0]}=?"
        return f"; settings: {', '.join(f'{name}=' for name in known)}" if known else ""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows settings as overrides."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.option_strings and "--help" not in action.option_strings:
            return _format_setting(action)
        return super()._format_action_invocation(action)


def _format_key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _format_setting(action: argparse.Action) -> str:
    value = "true" if action.nargs == 0 else "|".join(map(str, action.choices or [action.metavar]))
    return f"{_format_key(action.option_strings[-1])}={value}"


def is_launcher_override(word: str) -> bool:
    """Return True for an override that chooses or configures a launcher."""
    return word.lstrip("+~").startswith(_LAUNCHER_PREFIXES)


def parse_positive_int(text: str) -> int:
    """Return a positive integer, or raise argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 18 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def build_list_parser(parse_item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a function that parses `A,B` or `[A,B]` to a list."""

    def parse_list(text: str) -> list[Any]:
        return [parse_item(item) for item in text.removeprefix("[").removesuffix("]").split(",")]

    return parse_list


def parse_number(text: str, integer: bool, positive: bool) -> float:
    """Return a finite, non-negative number, or raise argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    expected = f"a{' whole' if integer else ''} number{' above 0' if positive else ' of 0 or more'}"
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")
    if integer and value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not {expected}, such as {math.ceil(value)}")
    return int(value) if integer else value


def parse_file_name(text: str, suffixes: Sequence[str]) -> Path:
    """Return the path of a file with one of the suffixes, or raise argparse.ArgumentTypeError."""
    if Path(text).suffix not in suffixes:
        raise argparse.ArgumentTypeError(f"{text} must end in {' or '.join(suffixes)}")
    return Path(text)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500MB, or raise argparse.ArgumentTypeError."""
    match = re.fullmatch(r"([0-9]{1,12})(KB|MB|GB)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 5GB or 500MB")
    return int(match[1]) * _SIZE_UNITS[match[2]]
