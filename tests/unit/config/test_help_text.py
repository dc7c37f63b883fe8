"""Arguments of `hlat train --help`."""

import pytest

from hlat.config.entry_point import select_help_text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ["--help", "hydra/help=hlat"]),
        (["-h", "a=1"], ["-h", "hydra/help=hlat", "a=1"]),
        (["a=1", "b=2", "--help"], ["hydra/help=hlat", "a=1", "b=2", "--help"]),
        (
            ["--config-dir", "my", "a=1", "-h"],
            ["--config-dir", "my", "hydra/help=hlat", "a=1", "-h"],
        ),
        (["a=--help", "--cfg", "job"], ["a=--help", "--cfg", "job"]),
    ],
)
def test_help_has_the_text_of_hlat(arguments: list[str], expected: list[str]) -> None:
    assert select_help_text(arguments) == expected
