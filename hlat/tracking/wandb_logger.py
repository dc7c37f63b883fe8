"""Weights & Biases logging, online or offline.

Without an API key the run is stored in the run directory in W&B's offline format and can be
uploaded later with `wandb sync`. All attempts resume the same W&B run. Model metrics are plotted
over tokens, as in the figures of the HLAT paper, and throughput metrics over steps.
"""

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from hlat.config import tracking
from hlat.config.batch import BatchConfig
from hlat.config.batch_steps import count_tokens
from hlat.config.redaction import redact_data, redact_text
from hlat.config.seeds import SEED_KEYS
from hlat.distributed.process_signals import block_signals
from hlat.storage.storage_path import validate_writable
from hlat.tracking.lost_work import END_EVENTS
from hlat.tracking.metric_logger import (
    MetricLogger,
    RunInfo,
    extract_event_scalars,
    extract_scalars,
    format_alert,
    needs_alert,
)
from hlat.tracking.row_validation import Row
from hlat.tracking.setting_labels import build_display_name

if TYPE_CHECKING:
    import wandb

_LOGGER = logging.getLogger("hlat")
_BLOCK_BYTES = 32_768
"""Block size of W&B's files."""
_Mode = Literal["online", "offline", "disabled"]
_CONNECT_TIMEOUT_S = 30.0
"""Timeout of the connection to W&B's servers; after it the run is stored offline."""
_STEP_METRICS = {
    **dict.fromkeys(("train/*", "eval/*", "router/*"), "tokens"),
    **dict.fromkeys(("perf/*", "data/*"), "step"),
}
"""Horizontal axis of each group of metrics."""
_ROWS_PER_STEP = 10
"""Rows of W&B's history, counted by its `_step`, that a training step can have: metrics, results of
evaluations, tokens by source, samples, and scores of earlier steps that arrived since."""
_TAGGED_GROUPS = ("model", "optimizer", "precision", "schedule", "hardware")
_MAX_TAG_LENGTH = 64
"""Characters of a tag that W&B accepts."""
_ALERT_LEVELS = {"finish": "INFO", "interrupt": "INFO", "diverge": "ERROR", "give_up": "ERROR"}


class WandbLogger(MetricLogger):
    """Logger for a W&B run.

    `batch` determines the tokens of an event, and `print_message` prints a message for the user.
    """

    def __init__(
        self,
        settings: tracking.WandbConfig,
        batch: BatchConfig,
        print_message: Callable[[str], None],
    ) -> None:
        self._settings, self._print_message = settings, print_message
        self._batch = batch
        self._exit_event, self._is_disk_full = "", False
        self._links = ExitStack()

    def start(self, run_info: RunInfo) -> None:
        """Open the W&B run, online if there is an API key and the servers respond, else offline."""
        self._wandb_dir = run_info.run_dir / "wandb"
        # W&B silently uses a temporary directory if this one is not writable
        validate_writable(self._wandb_dir)
        self._run_info = run_info
        is_first = run_info.attempt == 1
        self._open_at(run_info.step - is_first, must_rewind=run_info.repeats_rows)

    def _open_at(self, step: int, must_rewind: bool) -> None:
        """Open the W&B run after the rows of `step`; if later ones exist, it must be rewound."""
        run_info = self._run_info
        self._history_step = _ROWS_PER_STEP * (step + 1) - 1
        with block_signals():  # W&B's process sends the last rows after a signal to the whole job
            self._run = self._open_run(run_info, step if must_rewind else None)
        for pattern, axis in _STEP_METRICS.items():
            self._run.define_metric(pattern, step_metric=axis)
        attempt = {"code_revision": run_info.code_revision, "attempt": run_info.attempt}
        config: Any = self._run.config  # its methods are not typed
        config.update({**run_info.config, **attempt}, allow_val_change=True)

    def log_metrics(self, row: Row) -> None:
        """Log the scalars of a row of metrics.jsonl."""
        self._log_row(row["step"], extract_scalars(row))
        self._check_disk_space()

    def log_event(self, row: Row) -> None:
        """Log the scalars of an event; send an alert if the event needs one."""
        name, step = row["event"], row["step"]
        if name in END_EVENTS:
            self._exit_event = name
            self._run.summary["state"] = name
        if scalars := extract_event_scalars(row):
            self._log_row(step, scalars)
        if name == "samples":
            self._log_samples(row)
        if needs_alert(row):
            title, level = f"{self._run.name}: {name}", _ALERT_LEVELS.get(name, "WARN")
            self._run.alert(title, format_alert(row), level, wait_duration=60)
        if name == "phase":
            self._run.summary["phase"] = row["name"]
        if name == "checkpoint" and self._settings.checkpoints is not None:
            self._log_checkpoint(row, self._settings.checkpoints)

    def _log_samples(self, row: Row) -> None:
        import wandb

        step, texts = row["step"], row["texts"]
        rows = [[step, sample["prompt"], sample["text"]] for sample in texts]
        table = wandb.Table(columns=["step", "prompt", "text"], data=rows)
        self._log_row(step, {"samples": table})

    def _log_row(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a row to W&B's history, which ignores rows that are not after its last one."""
        self._history_step = max(self._history_step + 1, _ROWS_PER_STEP * step)
        position = {"step": step, "tokens": count_tokens(step, self._batch)}
        self._run.log({**position, **values}, step=self._history_step, commit=True)

    def rewind(self, step: int) -> None:
        """Open the W&B run again without the rows after `step`."""
        self._run.finish()
        self._open_at(step, must_rewind=True)
        self._run.summary["rewound_to"] = step

    def finish(self, summary: Mapping[str, float]) -> None:
        """Log the summary metrics and finish the W&B run; mark an interrupted run as preempting."""
        self._run.summary.update(dict(summary))
        if self._exit_event == "interrupt":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if self._exit_event == "finish" else 1)
        self._check_disk_space()
        _teardown()
        self._links.close()

    def abort(self) -> None:
        """Kill W&B's service process, which would otherwise block the exit of this process."""
        for pid in _find_wandb_core_pids():
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        with suppress(Exception):  # teardown raises various errors without its service process
            _teardown()
        self._links.close()

    def _log_checkpoint(self, row: Row, mode: tracking.CheckpointArtifact) -> None:
        """Log a checkpoint as a version of the run's model artifact."""
        import wandb

        path, step = str(row["path"]), row["step"]
        metadata = {"step": step, "tokens": count_tokens(step, self._batch), "path": path}
        artifact = wandb.Artifact(f"{self._run.id}-model", type="model", metadata=metadata)
        try:
            if mode is tracking.CheckpointArtifact.upload:
                artifact.add_dir(path)
            else:
                uri = path if "://" in path else Path(path).absolute().as_uri()
                artifact.add_reference(uri, checksum=False)
        except (OSError, ValueError, wandb.Error) as error:  # for example, it was pruned
            _LOGGER.warning(f"W&B has no artifact of {path}: {error}")
            return
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def _check_disk_space(self) -> None:
        """Warn once if the disk is full, which W&B does not report."""
        if self._is_disk_full or shutil.disk_usage(self._wandb_dir).free >= _BLOCK_BYTES:
            return
        self._is_disk_full = True
        _LOGGER.warning(
            f"the disk of {self._wandb_dir} is full; W&B may lack rows that metrics.jsonl contains"
        )

    def _open_run(self, run_info: RunInfo, step: int | None) -> "wandb.Run":
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        mode = os.environ.get("WANDB_MODE", "online")
        reason = f"is configured by WANDB_MODE={mode}"
        if mode == "disabled":
            return self._init_run(run_info, "disabled", None)
        if mode == "online":
            try:
                if wandb.login(prompt=False):
                    return self._init_run(run_info, "online", step)
                reason = "has no API key (wandb login, or WANDB_API_KEY)"
            except wandb.Error as error:
                reason = f"cannot be reached ({str(error).splitlines()[0]})"
        offline_run = self._wandb_dir / f"offline-run-*-{run_info.service_run_id}"
        self._print_message(
            f"W&B {reason}; the run is stored offline; upload it with: wandb sync {offline_run}"
        )
        return self._init_run(run_info, "offline", step)

    def _init_run(self, run_info: RunInfo, mode: _Mode, step: int | None) -> "wandb.Run":
        """Return the W&B run, rewound to `step` if W&B can do so."""
        import wandb

        if step is None:
            return self._create_run(run_info, mode, resume="allow")
        moment = f"{run_info.service_run_id}?_step={self._history_step}"
        try:
            return self._create_run(run_info, mode, resume_from=moment)
        except wandb.Error as error:
            self._print_message(
                f"W&B cannot rewind the run to step {step} ({str(error).splitlines()[0]}); its "
                "page keeps the later rows, and ignores new ones of these steps"
            )
            return self._create_run(run_info, mode, resume="allow")

    def _create_run(self, run_info: RunInfo, mode: _Mode, **position: Any) -> "wandb.Run":
        import wandb

        settings = {k: v for k, v in vars(self._settings).items() if k != "checkpoints"}
        return wandb.init(
            **redact_data(settings | {"tags": build_tags(self._settings.tags, run_info.config)}),
            id=run_info.service_run_id,
            name=redact_text(build_display_name(run_info.name, run_info.overrides)),
            **position,
            mode=mode,
            dir=self._get_public_path(run_info.run_dir),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                init_timeout=_CONNECT_TIMEOUT_S,
                login_timeout=_CONNECT_TIMEOUT_S,
            ),
        )

    def _get_public_path(self, run_dir: Path) -> Path:
        """Return a path of the run directory without values of the environment, such as a link.

        W&B writes this path to its logs.
        """
        path = run_dir.absolute()
        if redact_text(str(path)) == str(path):
            return run_dir
        parent = self._links.enter_context(tempfile.TemporaryDirectory(prefix="hlat-wandb-"))
        link = Path(parent) / "run"
        link.symlink_to(path)
        return link


def build_tags(tags: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Return the user's tags, the choices of the groups in `_TAGGED_GROUPS`, and the study's."""
    names = [config.get(group, {}).get("name") for group in _TAGGED_GROUPS]
    known = [name[:_MAX_TAG_LENGTH] for name in names if isinstance(name, str) and name]
    return [*dict.fromkeys([*tags, *known, *_list_study_tags(config)])]


def _list_study_tags(config: Mapping[str, Any]) -> list[str]:
    """Return factors with their values and the seed of a run that belongs to a study.

    The choice of a group, such as `precision`, is a tag of all runs.
    """
    baseline = config.get("study", {}).get("baseline") or {}
    tags = []
    for key in (*baseline, *SEED_KEYS) if baseline else ():
        group, _, name = key.partition(".")
        value: Any = config.get(group)
        for part in name.split(".") if name else ():
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str | int | float) and "${" not in str(value):
            tags.append(f"{key}={value}"[:_MAX_TAG_LENGTH])
    return tags


def _teardown() -> None:
    import wandb

    wandb.teardown()


def _find_wandb_core_pids() -> list[int]:
    """Return the process ids of the W&B services started by this process."""
    service = {"name": "wandb-core", "ppid": os.getpid()}
    return [one.pid for one in psutil.process_iter(["name", "ppid"]) if one.info == service]
