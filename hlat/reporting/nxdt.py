"""A translated run of NxDT as lines: what it lacks, the command, and every key that it leaves."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

from hlat.config.foreign import shown
from hlat.planning.nxdt.translate import Listed, Translation, group_of, words

_WIDTH = 44


def page(name: str, translation: Translation, refused: Sequence[str]) -> list[str]:
    """Return the lines.

    Args:
        name: The file's.
        translation: What it comes to.
        refused: Why hlat.train would not run the command.
    """
    return [
        *_lacking(name, translation.lacking),
        *_command(translation),
        *_rest(translation, refused),
    ]


def _lacking(name: str, features: Sequence[str]) -> Iterator[str]:
    if features:
        listed = " and ".join(
            [", ".join(features[:-1]), features[-1]] if features[1:] else features
        )
        yield f"{shown(name)} is a run with {listed}, which hlat does not have. What remains of it:"
        yield ""


def _command(translation: Translation) -> Iterator[str]:
    """The command that trains it, a line for each group."""
    overrides = words(translation.overrides, translation.unset)
    lines = [shlex.join(group) for _, group in groupby(overrides, key=group_of)]
    yield "python -m hlat.train \\"
    yield from (f"  {line} \\" for line in lines[:-1])
    yield f"  {lines[-1]}"


def _rest(translation: Translation, refused: Sequence[str]) -> Iterator[str]:
    yield from _table("to be set by you, where it says ???:", list(translation.unset.items()))
    for title, listed in (
        ("to know:", [line for line in translation.said if line.reason]),
        ("no equivalent:", translation.left),
        ("no override needed:", translation.needless),
    ):
        yield from _table(title, [(_named(line), line.reason) for line in listed])
    if refused:
        yield from ("", "hlat.train would refuse this:", *(f"  {why}" for why in refused))


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield from ("", title)
        width = min(_WIDTH, max(len(what) for what, _ in rows))
        yield from (f"  {what:<{width}}  {why}" for what, why in rows)


def _named(line: Listed) -> str:
    return f"{shown(line.key, 100)}={shown(line.value)}"
