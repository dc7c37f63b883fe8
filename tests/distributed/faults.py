"""Pre-flight on ranks of which one is broken in a way that only arithmetic can tell."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.engine import device_checks
from hlat.engine.mesh_axis import MeshAxis
from hlat.engine.native.native_engine import NativeEngine
from hlat.launch_environment import read_rank_info
from hlat.recovery import host_info, preflight

_sum, _gather, _exchange, _time = (
    MeshAxis.all_reduce,
    MeshAxis.all_gather,
    MeshAxis.send_recv,
    time.time,
)


def _sends_wrong_bits() -> Any:
    """A rank whose numbers leave it with one element changed."""

    def sum_(self, tensor, wait=True):
        tensor[4321] += 1
        return _sum(self, tensor, wait)

    def gather(self, tensor):
        if tensor.is_floating_point():
            tensor = tensor.clone()
            tensor[4321] += 1
        return _gather(self, tensor)

    return mock.patch.multiple(MeshAxis, all_reduce=sum_, all_gather=gather)


def _gets_wrong_bits() -> Any:
    """A rank that adds up wrongly what arrived whole."""

    def sum_(self, tensor, wait=True):
        _sum(self, tensor, wait)
        tensor[4321] += 1

    return mock.patch.object(MeshAxis, "all_reduce", sum_)


def _is_slow() -> Any:
    """A rank that keeps those waiting that add up with it."""

    def sum_(self, tensor, wait=True):
        time.sleep(0.25)
        return _sum(self, tensor, wait)

    def exchange(self, tensor, other):
        time.sleep(0.25)
        return _exchange(self, tensor, other)

    return mock.patch.multiple(MeshAxis, all_reduce=sum_, send_recv=exchange)


def _multiplies_wrongly() -> Any:
    def product(one, other):
        result = one @ other
        result[7, 5] += 1
        return result

    return mock.patch.object(device_checks, "_matmul", product)


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
    """What pre-flight answers on this rank, whose node is named after it; its engine is closed."""
    engine = NativeEngine()
    here = read_rank_info().rank
    with mock.patch.object(host_info, "get_host_name", return_value=f"node{here}"):
        faulty: Any = _FAULTS[fault]() if here == broken else contextlib.nullcontext()
        with faulty:
            try:
                well = preflight.run_preflight(config, Path(folder), engine)
            except ConfigError as error:
                return list(error.problems)
    if well:
        engine.build(config)
        engine.close()
    return well
