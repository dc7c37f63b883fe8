"""Command lines of the entries that take files and flags in place of a configuration."""

import argparse
import difflib
from typing import NoReturn

from hlat.config.errors import Exit


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
