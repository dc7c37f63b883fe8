"""Who hears of a run besides its record, and under which names they know it.

W&B's name for a run must outlive the machine of the run folder, and is needed before there is a
checkpoint, so both keep it. Libraries are imported once a run asks for them.
"""

import importlib.util
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.config.tracking import Service
from hlat.tracking.aside import Aside
from hlat.tracking.listener import Listener
from hlat.tracking.tensorboard import TensorBoard
from hlat.tracking.wandb import Wandb

_FILE = "services.json"
"""In the run folder: what services that name runs themselves call this one."""
_NAMES = {Service.wandb: "W&B", Service.tensorboard: "TensorBoard"}


def refuse_missing(config: Config) -> None:
    """Refuse services whose libraries are not installed.

    Raises:
        ConfigError: With what to install.
    """
    problems = [
        f"tracking.services={service.value}: the package {service.value} is not installed; "
        f"pip install 'hlat[{service.value}]', or leave it out"
        for service in config.tracking.services
        if not _is_installed(service.value)
    ]
    if problems:
        raise ConfigError(*problems)


def identities(config: Config, folder: Path, saved: Mapping[str, str]) -> dict[str, str]:
    """Return what services that name runs themselves call this one; keep it in the run folder.

    Args:
        config: The run.
        folder: Its folder, whose word counts.
        saved: The same from the run's checkpoint; what neither knows gets a new name.
    """
    path = folder / _FILE
    kept = _read(path)
    known = {**saved, **kept}
    if Service.wandb in config.tracking.services:
        known.setdefault(Service.wandb.value, secrets.token_hex(4))
    if known != kept:
        written = path.with_name(f".{_FILE}.tmp")
        written.write_text(json.dumps(known, indent=2) + "\n")
        written.replace(path)
    return known


def listeners(config: Config, say: Callable[[str], None]) -> dict[str, Listener]:
    """Return a listener for each service that the configuration names, beside the loop."""
    made: dict[str, Listener] = {}
    for service in config.tracking.services:
        listener: Listener = (
            Wandb(config.tracking.wandb, config.batch.tokens_per_step, say)
            if service is Service.wandb
            else TensorBoard()
        )
        made[service.value] = Aside(_NAMES[service], listener)
    return made


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of that name, as W&B leaves some, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _read(path: Path) -> dict[str, str]:
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in told.items() if isinstance(value, str)}
