"""Notice of ranks that do not finish their start, with the call in which each of them waits.

A rank that waits for peers in another collective prints nothing. Compilation may take as long, so a
notice does not end the run; `recovery.step_timeout_s` does.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path

_FIRST_NOTICE_S = 120.0
"""Time after the start of the workers; each further notice follows after twice the time."""
_MAX_RANKS = 8
"""Number of ranks that a notice lists for each call."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""Line of a stack that faulthandler writes, with the innermost call first."""
_PACKAGE = Path(__file__).resolve().parent.parent


class StartNotice:
    """Times at which a notice is due: 2, 4, 8 ... minutes after `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin with new workers."""
        self._start, self._delay_s = time.monotonic(), _FIRST_NOTICE_S

    def is_due(self) -> bool:
        """Return True once for each of the times."""
        if time.monotonic() < self._start + self._delay_s:
            return False
        self._delay_s *= 2
        return True

    def format_message(self, stacks: Mapping[int, str], path: Path) -> str:
        """Return the message with the ranks at each call; `path` contains the stacks by rank."""
        ranks_by_call: dict[str, list[str]] = {}
        for rank, content in stacks.items():
            ranks_by_call.setdefault(find_call(content), []).append(str(rank))
        calls = [f"rank {_join(ranks)}: {call}" for call, ranks in ranks_by_call.items()]
        seconds = time.monotonic() - self._start
        return (
            f"hlat: the start is not complete after {seconds:.0f} s (compilation may take as "
            f"long); {'; '.join(calls)}; stacks are in {path}"
        )


def find_call(stacks: str) -> str:
    """Return the innermost call of hlat in the main thread of stacks that faulthandler wrote."""
    main = [thread for thread in stacks.split("\n\n") if " in _bootstrap\n" not in f"{thread}\n"]
    for file, line, function in _FRAME.findall("\n".join(main)):
        if (path := Path(file)).is_relative_to(_PACKAGE):
            return f"{function} ({path.relative_to(_PACKAGE.parent)}, line {line})"
    return "no call of hlat"


def _join(ranks: list[str]) -> str:
    more = len(ranks) - _MAX_RANKS
    return ", ".join(ranks[:_MAX_RANKS]) + (f" and {more} more" if more > 0 else "")
