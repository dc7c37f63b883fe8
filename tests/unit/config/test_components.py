"""Registration of components, and the schema with their settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from omegaconf import OmegaConf

from hlat.config import components
from hlat.config.bounds import bounded
from hlat.config.components import extend_schema, get_spec, register_component
from hlat.config.compose import compose_config, register_configs
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.model.attention_spec import AttentionSpec


@dataclass
class GateConfig:
    """Settings of a gate."""

    scale: float = bounded(2.0, above=0)
    """Factor."""


@pytest.fixture(autouse=True)
def _restore_components() -> Iterator[None]:
    before = components.list_registered()
    yield
    components.remove_components(components.list_registered() - before)
    register_configs()  # the schema without them


def register_gate() -> None:
    register_component("model.attention", "gate", "With a gate.", AttentionSpec(), GateConfig, int)


def compose_with_gate(*overrides: str) -> Config:
    register_gate()
    return resolve_config(compose_config(overrides))


def test_settings_of_a_component_are_keys_of_its_section() -> None:
    assert extend_schema(Config) is Config
    register_gate()
    schema = OmegaConf.structured(extend_schema(Config))
    assert schema.model.attention.gate.scale == 2.0
    assert isinstance(OmegaConf.to_object(schema.model.attention), type(ModelConfig().attention))


def test_a_component_uses_the_settings_of_its_base() -> None:
    register_component("model.mlp", "routed", "Text.", get_spec("model.mlp", "moe"), base="moe")
    overrides = ["model.mlp.kind=routed", "model.mlp.moe.num_experts=4"]
    config = resolve_config(compose_config(overrides))
    unused = components.list_unused_settings(config)
    assert "model.mlp.moe." not in unused
    assert "model.mlp.moe." in components.list_unused_settings(resolve_config(compose_config([])))


def test_a_selected_component_is_valid() -> None:
    config = compose_with_gate("model.attention.kind=gate", "model.attention.gate.scale=3")
    assert config.model.attention.gate.scale == 3.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.attention.kind=gat"], "model.attention.kind=gat is unknown; did you mean gate?"),
        (
            ["model.mlp.kind=wide"],
            "model.mlp.kind=wide is unknown; kinds: dense, moe; a kind of an",
        ),
        (
            ["model.attention.gate.scale=3"],
            "the settings model.attention.gate have no effect, since model.attention.kind is "
            "softmax; add model.attention.kind=gate or remove them",
        ),
        (
            ["model.attention.kind=gate", "model.attention.gate.scale=0"],
            "model.attention.gate.scale=0.0 is outside (0, inf)",
        ),
        (["schedule.name=cosinus"], "schedule.name=cosinus is unknown; did you mean cosine?"),
        (["tracking.metrics=[entropy]"], "tracking.metrics=entropy is unknown; kinds: none"),
    ],
)
def test_name_the_wrong_setting(overrides, message) -> None:
    with pytest.raises(ConfigError) as error:
        compose_with_gate(*overrides)
    assert message in str(error.value)


@dataclass
class WithoutDefault:
    """A setting without default."""

    scale: float
    names: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("section", "kind", "settings", "message"),
    [
        ("model.atention", "gate", None, "'model.atention' has no components; register one in"),
        ("model.attention", "my gate", None, "'my gate' of model.attention is not a name"),
        ("model.attention", "softmax", None, "model.attention already has a component softmax"),
        ("model.attention", "gate", int, "int is not a dataclass; add @dataclass"),
        ("model.attention", "gate", WithoutDefault, "WithoutDefault.scale has no default value"),
    ],
)
def test_refuse_a_wrong_registration(section, kind, settings, message) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        register_component(section, kind, "Text.", object(), settings)


def test_refuse_an_unknown_base() -> None:
    with pytest.raises(ConfigError, match=r"the base of model\.mlp=x: model\.mlp\.kind=mo is unk"):
        register_component("model.mlp", "x", "Text.", object(), base="mo")
