"""The translation of a NxD Training configuration as text: the command and the unmapped keys."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from hlat.config.untrusted_files import format_value
from hlat.figures.page_templates import render_text
from hlat.plan.nxdt.nxdt_translation import (
    ReportedKey,
    Translation,
    format_overrides,
    get_config_group,
)


def format_translation(name: str, translation: Translation, problems: Sequence[str]) -> list[str]:
    """Return the lines of the translation of a NxD Training file.

    `problems` are the reasons why hlat.train rejects the command.
    """
    overrides = format_overrides(translation.overrides, translation.unset)
    *features, last_feature = translation.missing_features or [""]
    return render_text(
        Path(__file__).with_name("templates") / "nxdt_translation.txt.j2",
        name=format_value(name),
        features=" and ".join(filter(None, [", ".join(features), last_feature])),
        groups=[shlex.join(group) for _, group in groupby(overrides, key=get_config_group)],
        unset=[*translation.unset.items()],
        noted=_build_rows(key for key in translation.mapped if key.reason),
        unsupported=_build_rows(translation.unsupported),
        redundant=_build_rows(translation.redundant),
        problems=problems,
    )


def _build_rows(keys: Iterable[ReportedKey]) -> list[tuple[str, str]]:
    """Return setting and reason of each key."""
    return [(f"{format_value(key.key, 100)}={format_value(key.value)}", key.reason) for key in keys]
