"""Command lines of the entries that take files and flags in place of a configuration."""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hlat.config.errors import Exit

_READER_LEFT = 141
"""What a shell says of a program that SIGPIPE has ended."""


def leave(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the code of an entry; quietly where its reader has left before, as `| head` does.

    Python would tell of the broken pipe in the middle of the output, or once more when it ends
    (docs.python.org/3/library/signal.html, note on SIGPIPE).
    """
    code: Any = _READER_LEFT
    try:
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """Takes flags as they are written out, and tells a misspelled one in one line."""

    def __init__(self, prog: str, description: str, epilog: str, usage: str | None = None) -> None:
        """Show description and examples line by line as they are."""
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def settings(
        self, words: Sequence[str], known: Mapping[str, Callable[[str], Any]]
    ) -> dict[str, Any]:
        """Read settings like `last=2`; exit with all that is wrong with them.

        Args:
            words: What was typed.
            known: What turns the text of each setting into a value, or raises ValueError with what
                the text should have been.
        """
        found: dict[str, Any] = {}
        problems = []
        for word in words:
            name, _, text = word.partition("=")
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f"did you mean {near[0]}=?" if near else f"there are {', '.join(known)}"
                problems.append(f"{word} is no setting; {meant}")
                continue
            if name in found:
                problems.append(f"{name}= is given twice")
            try:
                found[name] = known[name](text)
            except ValueError as error:
                problems.append(f"{word}: {error}")
        if problems:
            self._refuse(*problems)
        return found

    def error(self, message: str) -> NoReturn:
        """Exit with what is wrong, and the flag that was meant."""
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown, known, 1) if unknown != message else []
        hint = f"; did you mean {near[0]}?" if near else "; --help lists what there is"
        self._refuse(f"{message}{hint}")

    def _refuse(self, *sentences: str) -> NoReturn:
        entry = self.prog.removeprefix("python -m ")
        lines = [f"{entry}: {sentence}\n" for sentence in sentences]
        self.exit(Exit.CONFIGURATION, "".join(lines))


def count(text: str) -> int:
    """A positive whole number.

    Raises:
        ValueError: The text is none.
    """
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 18 and int(text) > 0):
        raise ValueError("needs a whole number of 1 or more")
    return int(text)


def number(text: str, whole: bool, positive: bool) -> float:
    """A finite number that is not negative.

    Args:
        text: What was typed.
        whole: Whether it must be a whole one.
        positive: Whether it must be above 0.

    Raises:
        ValueError: The text is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    wanted = (
        f"needs a{' whole' if whole else ''} number{' above 0' if positive else ' of 0 or more'}"
    )
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(wanted)
    if whole and value != int(value):
        raise ValueError(f"{wanted}, such as {math.ceil(value)}")
    return int(value) if whole else value
