"""Environment variables of a device with stochastic rounding."""

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.engine.native.device import build_environment

SWITCH = "NEURON_RT_STOCHASTIC_ROUNDING_EN"


@pytest.mark.parametrize(("recipe", "switch"), [("bf16_sr", "1"), ("mixed", "0")])
def test_hardware_rounding_variable(compose, small, recipe, switch):
    config = resolve_config(compose(*small, f"precision={recipe}", "compiler=neuron_2_33"))
    assert build_environment(config, "neuron")[SWITCH] == switch


def test_hardware_rounding_needs_a_pinned_sdk(compose, small):
    config = resolve_config(compose(*small, "precision=bf16_sr"))
    assert build_environment(config, "cpu") == {}
    with pytest.raises(ConfigError, match=r"compiler\.neuron_sdk=null sets no mode"):
        build_environment(config, "neuron")
