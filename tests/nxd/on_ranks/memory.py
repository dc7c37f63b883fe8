"""Host memory of a rank, by part of a run."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import hlat.train
from hlat.checkpoint.checkpointer import Checkpointer
from hlat.config.run import Config
from hlat.engine.nxd import nxd_engine
from hlat.engine.nxd.nxd_engine import NxdEngine

Part = tuple[str, int, int]
"""Name, private bytes at its start, and increase of the resident bytes up to their peak."""


def parts_of_run(config: Config, config_yaml: str) -> list[Part]:
    """Train; return build, initial values, start of the saves, and each step and save.

    Initial values are part of the build in older versions.
    """
    parts: list[Part] = []
    with (
        mock.patch.object(NxdEngine, "build", _measured("build", parts, NxdEngine.build)),
        mock.patch.object(
            nxd_engine, "init_weights", _measured("initial values", parts, nxd_engine.init_weights)
        ),
        mock.patch.object(
            Checkpointer, "__init__", _measured("staging", parts, Checkpointer.__init__)
        ),
        mock.patch.object(NxdEngine, "train_step", _measured("step", parts, NxdEngine.train_step)),
        mock.patch.object(Checkpointer, "save", _measured("save", parts, Checkpointer.save)),
    ):
        hlat.train.run_worker(config, config_yaml, [])
    return parts


def _measured(name: str, parts: list[Part], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def measured(*arguments: Any, **options: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
        private, before = _read("RssAnon"), _read("VmRSS")
        result = function(*arguments, **options)
        if name == "staging":
            arguments[0]._buffers_ready.result()
        parts.append((name, private, _read("VmHWM") - before))
        return result

    return measured


def _read(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024
