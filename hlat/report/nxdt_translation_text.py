"""The translation of a NxD Training configuration as text: the command and the unmapped keys."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

from hlat.config.untrusted_files import format_value
from hlat.plan.nxdt.nxdt_translation import (
    ReportedKey,
    Translation,
    format_overrides,
    get_config_group,
)

_MAX_KEY_WIDTH = 44


def format_translation(name: str, translation: Translation, problems: Sequence[str]) -> list[str]:
    """Return the lines of the translation of a NxD Training file.

    `problems` are the reasons why hlat.train rejects the command.
    """
    lines = []
    if missing := translation.missing_features:
        features = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        lines += [
            f"{format_value(name)} uses {features}, which hlat does not support. Without them:",
            "",
        ]
    lines += _format_command(translation)
    lines += _format_table("to be set by you, where it says ???:", list(translation.unset.items()))
    for title, keys in (
        ("to know:", [key for key in translation.mapped if key.reason]),
        ("no equivalent:", translation.unsupported),
        ("no override needed:", translation.redundant),
    ):
        lines += _format_table(title, [(_format_setting(key), key.reason) for key in keys])
    if problems:
        lines += ["", "hlat train would reject this:", *(f"  {problem}" for problem in problems)]
    return lines


def _format_command(translation: Translation) -> Iterator[str]:
    """Yield the lines of the training command, one per config group."""
    overrides = format_overrides(translation.overrides, translation.unset)
    lines = [shlex.join(group) for _, group in groupby(overrides, key=get_config_group)]
    yield "hlat train \\"
    yield from (f"  {line} \\" for line in lines[:-1])
    yield f"  {lines[-1]}"


def _format_table(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield from ("", title)
        width = min(_MAX_KEY_WIDTH, max(len(setting) for setting, _ in rows))
        yield from (f"  {setting:<{width}}  {reason}" for setting, reason in rows)


def _format_setting(key: ReportedKey) -> str:
    return f"{format_value(key.key, 100)}={format_value(key.value)}"
