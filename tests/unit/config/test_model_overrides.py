"""Test that the overrides of a model select it."""

import pytest

from hlat.config.compose import load_model_presets
from hlat.config.config_json import parse_section
from hlat.config.model import ModelConfig
from hlat.config.model_overrides import format_model_overrides, format_override
from hlat.config.resolve import convert_to_dataclasses

PRESETS = load_model_presets()
CHANGES = [
    "model.attention.layer_pattern=[full,sliding]",
    "model.attention.sliding_window=64",
    "model.rms_norm_eps=1e-9",
    "model.norm.placement=post",
    "model.intermediate_size=96",
    "model.init_from=somewhere",
]


@pytest.mark.slow  # composes all models; the default suite has those of test_configs.py
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_needs_no_other_override(name: str) -> None:
    model = parse_section(ModelConfig, PRESETS[name])
    assert model.name == name
    assert format_model_overrides(model) == [f"model={name}"]


@pytest.mark.parametrize(("preset", "name"), [("qwen3_tiny", None), ("tiny", "my model, v=2")])
def test_overrides_restore_a_changed_model(compose, preset: str, name: str | None) -> None:
    given = [f"model={preset}", *CHANGES, *([] if name is None else [f'model.name="{name}"'])]
    model = convert_to_dataclasses(compose(*given)).model
    overrides = format_model_overrides(model)
    assert overrides[0] == f"model={preset}"
    assert len(overrides) == len(given) - 1  # without init_from
    found = convert_to_dataclasses(compose(*overrides, "model.init_from=somewhere")).model
    assert found == model


@pytest.mark.slow
def test_a_model_with_another_name_is_the_default_with_its_settings(compose) -> None:
    model = convert_to_dataclasses(compose("model=gemma3_tiny", "model.name=mine")).model
    overrides = format_model_overrides(model)
    assert overrides[:2] == ["model=tiny", "model.name=mine"]
    assert convert_to_dataclasses(compose(*overrides)).model == model


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a/b.c-d", "a/b.c-d"),
        ("<s>", '"<s>"'),
        ("été =", '"été ="'),
        (None, "null"),
        (True, "true"),
    ],
)
def test_quote_a_value_unless_it_is_a_plain_word(value: object, expected: str) -> None:
    assert format_override("x", value) == f"x={expected}"
