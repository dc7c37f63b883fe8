"""What a run shows while it goes."""

from dataclasses import dataclass
from enum import Enum


class Console(Enum):
    """Styles of progress."""

    auto = "auto"
    """A bar on a terminal, lines elsewhere."""
    bar = "bar"
    """A progress bar."""
    lines = "lines"
    """A line per logged step."""


@dataclass
class Tracking:
    """metrics.jsonl and events.jsonl are always written; this is what is shown besides."""

    console: Console = Console.auto
    """Style of progress on the console."""
