"""The external tracking services of a run and their run ids.

The W&B id of a run must outlive the host of the run directory, and is needed before the first
checkpoint. It is therefore stored in both. Libraries of services are imported only if configured.
"""

import importlib.util
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hlat.config.config_errors import raise_config_errors
from hlat.config.run import Config
from hlat.config.tracking import TrackingService
from hlat.storage.durable_files import replace_file
from hlat.tracking.async_logger import AsyncLogger
from hlat.tracking.metric_logger import MetricLogger
from hlat.tracking.tensorboard_logger import TensorBoardLogger
from hlat.tracking.wandb_logger import WandbLogger

_RUN_IDS_FILE = "services.json"
"""File in the run directory: the run's id in each service that assigns ids."""
_DISPLAY_NAMES = {TrackingService.wandb: "W&B", TrackingService.tensorboard: "TensorBoard"}


def validate_installed_services(config: Config) -> None:
    """Raise ConfigError if the library of a configured service is not installed."""
    problems = [
        f"tracking.services={service.value}: the package {service.value} is not installed; "
        f"pip install 'hlat[{service.value}]', or remove the service"
        for service in config.tracking.services
        if not _is_installed(service.value)
    ]
    raise_config_errors(problems)


def load_service_run_ids(
    config: Config, run_dir: Path, saved_ids: Mapping[str, str]
) -> dict[str, str]:
    """Return the run's id in each service that assigns ids, and store it in the run directory.

    Ids in the run directory take precedence over `saved_ids`, those in the checkpoint. An id that
    is in neither place is generated.
    """
    path = run_dir / _RUN_IDS_FILE
    stored: dict[str, str] = {}
    with suppress(OSError, ValueError):  # the file is missing or damaged
        stored = json.loads(path.read_text())
    run_ids = {**saved_ids, **stored}
    if TrackingService.wandb in config.tracking.services:
        run_ids.setdefault(TrackingService.wandb.value, secrets.token_hex(4))
    if run_ids != stored:
        replace_file(path, (json.dumps(run_ids, indent=2) + "\n").encode())
    return run_ids


def read_wandb_run_id(run_dir: Path) -> str | None:
    """Return the id of a run in W&B; None if it has none."""
    try:
        run_id = json.loads((run_dir / _RUN_IDS_FILE).read_text())[TrackingService.wandb.value]
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged
        return None
    return run_id if isinstance(run_id, str) else None


def build_metric_loggers(
    config: Config, print_message: Callable[[str], None]
) -> dict[str, MetricLogger]:
    """Return an asynchronous logger for each configured service."""
    loggers: dict[str, MetricLogger] = {}
    for service in config.tracking.services:
        logger: MetricLogger = (
            WandbLogger(config.tracking.wandb, config.batch, print_message)
            if service is TrackingService.wandb
            else TensorBoardLogger()
        )
        loggers[service.value] = AsyncLogger(_DISPLAY_NAMES[service], logger)
    return loggers


def _is_installed(package: str) -> bool:
    """Return True if a package has code; W&B leaves directories named "wandb", which have none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
