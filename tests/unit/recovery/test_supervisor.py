"""Start of supervised workers, and signals that arrive before it."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.resolve import resolve_config
from hlat.recovery.supervisor import Supervisor, launch_workers


@pytest.mark.parametrize("found", [0, 7])
def test_a_machine_without_the_devices_of_the_hardware_starts_no_process(
    compose, tmp_path, monkeypatch, found
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: found)
    config = resolve_config(compose("hardware=h100_p5", f"run.root={tmp_path}"))
    expected = rf"hardware=p5\.48xlarge has 8 GPUs per node, and torch finds {found or 'none'} on"
    with pytest.raises(ConfigError, match=expected):
        launch_workers(config, ["false"])
    assert not any(tmp_path.iterdir())


def test_workers_start_with_the_variables_of_compiler_and_recipe(
    compose, small, tmp_path, monkeypatch
):
    overrides = ("compiler=neuron_2_33", "precision=bf16_sr", f"run.root={tmp_path}")
    config = resolve_config(
        compose(*small, *overrides, "+compiler.environment.MALLOC_ARENA_MAX='64'")
    )
    environment = {}

    def supervise() -> ExitCode:
        environment.update(os.environ)
        return ExitCode.FINISHED

    supervisor = SimpleNamespace(
        supervise=supervise, forward_signal=signal.SIG_IGN, request_stacks=signal.SIG_IGN
    )
    monkeypatch.setattr("hlat.recovery.supervisor.Supervisor", lambda *_: supervisor)
    assert launch_workers(config, []) is ExitCode.FINISHED
    expected = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1", "MALLOC_ARENA_MAX": "64"}
    assert expected.items() <= environment.items()
    assert not expected.items() <= os.environ.items()


def test_a_signal_before_the_workers_start_is_forwarded_to_them(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    workers = [SimpleNamespace(id=None)]
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._received_signal, supervisor._signaled_ids = None, []
    group = SimpleNamespace(workers=workers)
    supervisor._agent = SimpleNamespace(get_worker_group=lambda: group)
    supervisor.forward_signal(signal.SIGUSR1, None)
    assert not sent
    workers[0].id = 7
    for _ in range(2):
        supervisor._forward_early_signal()
    assert sent == [(7, signal.SIGUSR1)]
