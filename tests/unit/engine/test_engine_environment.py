"""What a device is told before it is used."""

import pytest

from hlat.config.errors import ConfigError
from hlat.config.resolve import resolve
from hlat.engine.native.device import environment

SWITCH = "NEURON_RT_STOCHASTIC_ROUNDING_EN"


@pytest.mark.parametrize(("recipe", "switch"), [("bf16_sr", "1"), ("mixed", "0")])
def test_hardware_that_rounds_is_told_how(compose, small, recipe, switch):
    config = resolve(compose(*small, f"precision={recipe}", "compiler=neuron_2_33"))
    assert environment(config, "neuron")[SWITCH] == switch


def test_without_a_pin_it_could_not_be_told(compose, small):
    config = resolve(compose(*small, "precision=bf16_sr"))
    assert environment(config, "cpu") == {}
    with pytest.raises(ConfigError, match=r"compiler\.neuron_sdk=null sets no mode"):
        environment(config, "neuron")
