"""Environment variables of a device with stochastic rounding."""

import os
from contextlib import closing
from unittest import mock

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.engine_capabilities import validate_device
from hlat.config.resolve import resolve_config
from hlat.engine.native import device
from hlat.engine.native.native_engine import NativeEngine

SWITCH = "NEURON_RT_STOCHASTIC_ROUNDING_EN"


@pytest.mark.parametrize(("recipe", "switch"), [("bf16_sr", "1"), ("mixed", "0")])
def test_hardware_rounding_variable(compose, small, recipe, switch):
    config = resolve_config(compose(*small, f"precision={recipe}", "compiler=neuron_2_33"))
    seen = []

    def read_variables() -> None:
        seen.append(os.environ.get(SWITCH))

    # The runtime reads the variables when a process first accesses a device
    accelerator = mock.patch.object(device, "_find_accelerator", read_variables)
    mode = mock.patch("torch.set_deterministic_debug_mode")
    with mock.patch.dict(os.environ), accelerator, mode, closing(NativeEngine()) as engine:
        engine.build(config)
    assert seen == [switch]


def test_hardware_rounding_needs_a_pinned_sdk(compose, small):
    config = resolve_config(compose(*small, "precision=bf16_sr"))
    validate_device(config, "cpu")
    with pytest.raises(
        ConfigError, match=r"device neuron with .* compiler\.neuron_sdk=null is not supported"
    ):
        validate_device(config, "neuron")
