"""Backend of torch.compile, which follows from the device."""

import importlib.util
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.engine.native.device import COMPILE_BACKENDS, select_compile_backend
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed import checks


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [("mixed", {"layers_0", "_logits_to_grad_"}), ("bf16_sr", {"layers_0", "_round_bits_"})],
)
def test_all_compiled_code_has_the_backend_of_the_device(
    compose, small, monkeypatch, recipe: str, compiled: set[str]
) -> None:
    found = set()

    def record(function, *, backend: str, **_: object):
        found.add((function.__name__, backend))
        return function

    monkeypatch.setitem(COMPILE_BACKENDS, "cpu", "eager")
    monkeypatch.setattr(torch, "compile", record)
    overrides = (f"precision={recipe}", "compiler=inductor", "engine.device=cpu")
    config = resolve_config(compose(*small, *overrides))
    with closing(NativeEngine()) as engine:
        engine.build(config)
        engine.train_step(checks.shard_batch(checks.batches(config, 1)[0], engine), 1e-3)
    assert found == {(name, "eager") for name in compiled}


def test_a_device_without_its_backend_is_an_error_before_the_first_step(
    compose, small, monkeypatch
) -> None:
    config = resolve_config(compose(*small, "compiler=neuron_2_33_compiled"))
    neuron, other = (SimpleNamespace(type=name) for name in ("neuron", "shim"))
    with pytest.raises(ConfigError, match=r"has no backend neuron in this Python, .* TorchNeuron"):
        select_compile_backend(config, neuron)
    monkeypatch.setattr(torch.compiler, "list_backends", lambda exclude_tags: ["neuron"])
    assert select_compile_backend(config, neuron) == "neuron"
    monkeypatch.setattr(torch.compiler, "list_backends", lambda exclude_tags: ["inductor"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="compiler=inductor needs Triton on shim"):
        select_compile_backend(config, other)
    assert select_compile_backend(resolve_config(compose(*small)), other) is None
