"""Environment variables and preparation of a device."""

import os
import sys
from contextlib import closing
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

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


def test_steps_are_not_profiled_on_trainium(compose, small):
    config = resolve_config(compose(*small, "profiler.steps=[3]"))
    validate_device(config, "cpu")
    validate_device(config, "cuda")
    with pytest.raises(ConfigError, match=r"device neuron with profiler\.steps=\[3\] is not sup"):
        validate_device(config, "neuron")


@pytest.mark.parametrize(
    ("device_type", "deterministic", "warns"),
    [("neuron", "true", True), ("neuron", "false", False), ("cpu", "true", False)],
)
def test_slow_determinism_is_a_warning(
    compose, small, capsys, device_type: str, deterministic: str, warns: bool
):
    config = resolve_config(compose(*small, f"engine.deterministic={deterministic}"))
    with mock.patch("torch.set_deterministic_debug_mode") as mode:
        device.prepare_device(config, SimpleNamespace(type=device_type))
    assert mode.call_args.args == ("error" if deterministic == "true" else "default",)
    assert ("engine.deterministic=true disables TorchNeuron's" in capsys.readouterr().err) == warns


def test_torchneuron_is_imported_before_the_accelerator_is_read(tmp_path, monkeypatch):
    (tmp_path / "torch_neuronx.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        device._find_accelerator()
        assert "torch_neuronx" in sys.modules


def test_arrays_are_copied_from_pinned_memory(monkeypatch):
    pinned = []

    def pin(tensor):
        pinned.append(tensor.tolist())
        return tensor.clone()

    monkeypatch.setattr(device, "_has_pinned_memory", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    tokens = np.arange(4, dtype=np.int32)
    assert device.copy_to_device(tokens, torch.device("meta")).is_meta
    assert pinned == [[0, 1, 2, 3]]
    assert device.copy_to_device(tokens, torch.device("cpu")).tolist() == [0, 1, 2, 3]
    assert len(pinned) == 1


def test_pinned_memory_is_not_used_without_an_allocator(monkeypatch):
    def refuse(tensor):
        raise RuntimeError("no allocator")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    device._has_pinned_memory.cache_clear()
    assert device.copy_to_device(np.zeros(2, np.int32), torch.device("meta")).is_meta
    device._has_pinned_memory.cache_clear()
