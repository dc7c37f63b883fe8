"""YAML that OmegaConf writes in C equals that of its emitter in Python."""

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf import _utils as omegaconf_utils

from hlat.config.compose import compose_config

TEXTS = [
    "",
    "null",
    "1e-3",
    "yes: no",
    "# no comment",
    "two\nlines",
    " spaces ",
    "\u00fc\u00f1\u00ef \u4f60\u597d \u0926\u0947\u0935",
    "'quoted' \"twice\"",
    "a " * 100,
    "${run.root}/x",
    "-",
    "[x]",
    "08",
]


@pytest.mark.parametrize("overrides", [[], ["model=70b", "precision=mixed", "+sweep=beta2"]])
def test_a_configuration_is_written_as_in_python(overrides: list[str]) -> None:
    config = compose_config(overrides)
    tree = OmegaConf.to_container(config, enum_to_str=True)
    assert OmegaConf.to_yaml(config) == write_in_python(tree)


def test_strings_are_written_as_in_python() -> None:
    tree = {"texts": TEXTS, **{text: index for index, text in enumerate(TEXTS) if text}}
    written = OmegaConf.to_yaml(OmegaConf.create(tree))
    assert written == write_in_python(tree)
    assert OmegaConf.create(written) == tree


def test_characters_beyond_16_bits_are_read_back() -> None:
    tree = {"name": "\U0001f9ea run"}
    assert OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(tree))) == tree


def write_in_python(tree: object) -> str:
    """Return the text of `OmegaConf.to_yaml` with PyYAML's emitter."""
    return yaml.dump(
        tree,
        Dumper=omegaconf_utils.get_omega_conf_dumper(),
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
    )
