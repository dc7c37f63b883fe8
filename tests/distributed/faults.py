"""Run pre-flight on several ranks with a fault on one of them."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.rank_environment import read_rank_info
from hlat.engine import device_checks
from hlat.engine.native.native_engine import NativeEngine
from hlat.recovery import host_info, preflight

_all_reduce, _all_gather, _send_recv, _time = (
    MeshAxis.all_reduce,
    MeshAxis.all_gather,
    MeshAxis.send_recv,
    time.time,
)


def _sends_wrong_bits() -> Any:
    """Change one element of each tensor that the rank sends."""

    def all_reduce(self, tensor, wait=True):
        tensor[4321] += 1
        return _all_reduce(self, tensor, wait)

    def all_gather(self, tensor):
        if tensor.is_floating_point():
            tensor = tensor.clone()
            tensor[4321] += 1
        return _all_gather(self, tensor)

    return mock.patch.multiple(MeshAxis, all_reduce=all_reduce, all_gather=all_gather)


def _gets_wrong_bits() -> Any:
    """Change one element of each sum that the rank computes."""

    def all_reduce(self, tensor, wait=True):
        _all_reduce(self, tensor, wait)
        tensor[4321] += 1

    return mock.patch.object(MeshAxis, "all_reduce", all_reduce)


def _is_slow() -> Any:
    """Delay the collectives of the rank."""

    def all_reduce(self, tensor, wait=True):
        time.sleep(0.25)
        return _all_reduce(self, tensor, wait)

    def send_recv(self, tensor, other):
        time.sleep(0.25)
        return _send_recv(self, tensor, other)

    return mock.patch.multiple(MeshAxis, all_reduce=all_reduce, send_recv=send_recv)


def _multiplies_wrongly() -> Any:
    def matmul(one, other):
        result = one @ other
        result[7, 5] += 1
        return result

    return mock.patch.object(device_checks, "_matmul", matmul)


def _is_ahead() -> Any:
    return mock.patch.object(preflight.time, "time", side_effect=lambda: _time() + 100)


def _has_a_full_disk() -> Any:
    usage = shutil.disk_usage("/")._replace(free=1000)
    return mock.patch.object(preflight.shutil, "disk_usage", return_value=usage)


_FAULTS = {
    "full": _has_a_full_disk,
    "sends": _sends_wrong_bits,
    "gets": _gets_wrong_bits,
    "slow": _is_slow,
    "multiplies": _multiplies_wrongly,
    "ahead": _is_ahead,
}


def check(config: Config, folder: str, fault: str, broken: int) -> bool | list[str]:
    """Return the result or the errors of pre-flight; each rank has a separate node name."""
    engine = NativeEngine()
    rank = read_rank_info().rank
    with mock.patch.object(host_info, "get_host_name", return_value=f"node{rank}"):
        faulty: Any = _FAULTS[fault]() if rank == broken else contextlib.nullcontext()
        with faulty:
            try:
                is_healthy = preflight.run_preflight(config, Path(folder), engine)
            except ConfigError as error:
                return list(error.problems)
    if is_healthy:
        engine.build(config)
        engine.close()
    return is_healthy
