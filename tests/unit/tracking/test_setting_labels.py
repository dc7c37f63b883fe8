"""Names of runs and labels of settings."""

import pytest

from hlat.tracking.setting_labels import build_display_name, shorten_keys


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("beta2", ["optimizer.lr=1"], "beta2"),
        ("tiny-0123abcd", [], "tiny-0123abcd"),
        (
            "tiny-0123abcd",
            ["model=tiny", "optimizer.lr=1e-3", "run.seed=2", "tracking=wandb", "run.root=/x"],
            "tiny-0123abcd: lr=1e-3, seed=2",
        ),
        (
            "tiny-0123abcd",
            ["precision=mixed", "data.root=${oc.env:X}"],
            "tiny-0123abcd: precision=mixed",
        ),
    ],
)
def test_generated_names_get_the_overrides(name: str, overrides: list[str], expected: str) -> None:
    assert build_display_name(name, overrides) == expected


def test_long_names_are_truncated() -> None:
    name = build_display_name("tiny-0123abcd", [f"model.a{i}={'x' * 20}" for i in range(20)])
    assert len(name) == 120
    assert name.endswith("…")


def test_keys_are_shortened_while_distinct() -> None:
    keys = ["optimizer.lr", "precision.name", "data.sources.a.weight", "data.sources.b.weight"]
    assert [*shorten_keys(keys).values()] == ["lr", "precision", "a.weight", "b.weight"]
