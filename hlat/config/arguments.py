"""Command lines of the entries that take files and flags in place of a configuration."""

import argparse
import difflib
import math
from collections.abc import Sequence
from typing import NoReturn

from hlat.config.errors import ConfigError, Exit


class Parser(argparse.ArgumentParser):
    """Tells a misspelled flag in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with what is wrong, and the flag that was meant."""
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown, known, 1) if unknown != message else []
        hint = f"; did you mean {near[0]}?" if near else "; --help lists what there is"
        entry = self.prog.removeprefix("python -m ")
        self.exit(Exit.CONFIGURATION, f"{entry}: {message}{hint}\n")


def settings(words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return the values of `key=value` words; the last one of a key counts.

    Raises:
        ConfigError: Every word that is none, or names a key that is not known, with the nearest.
    """
    given, problems = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"keys: {', '.join(known)}"
            problems.append(f"{key} is not a key here; {hint}")
        elif not equals or not value:
            problems.append(f"{word} has no value; write {key}=VALUE")
        given[key] = value
    if problems:
        raise ConfigError(*problems)
    return given


def number(key: str, text: str, whole: bool, positive: bool) -> float:
    """Return the number that `key=text` sets.

    Raises:
        ConfigError: It is none, or a fraction or a sign that the key cannot have.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    wanted = f"{'a whole' if whole else 'a'} number{' above 0' if positive else ', 0 or more'}"
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ConfigError(f"{key}={text} must be {wanted}")
    if whole and value != int(value):
        raise ConfigError(f"{key}={text} must be {wanted}; use {key}={math.ceil(value)}")
    return int(value) if whole else value
