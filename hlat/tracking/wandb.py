"""Shows a run in Weights & Biases, with an account or without one.

Without a key everything lies in the run folder, as W&B's own library writes it, and can be sent
later. Every attempt goes on under the same id, so that a run that was restarted ten times is one
run there too. Curves of the model lie over tokens, as in the paper's figures, those of the machine
over steps.
"""

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hlat.config import tracking
from hlat.tracking.listener import ALERTS, Beginning, Row, event_scalars, scalars, sentence

if TYPE_CHECKING:
    import wandb

_LOGGER = logging.getLogger("hlat")
_BLOCK = 32_768
"""Bytes: the library's files are made of blocks of this size."""
_Mode = Literal["online", "offline", "disabled"]
_SECONDS_TO_REACH = 30.0
"""Given to W&B's servers when an attempt begins; then the run is kept offline."""
_AXES = {
    **dict.fromkeys(("train/*", "heldout/*", "eval/*"), "tokens"),
    **dict.fromkeys(("speed/*", "data/*"), "step"),
}
"""What lies over what."""
_ENDINGS = ("finish", "interrupt", "diverge", "fail")
_LEVELS = {"finish": "INFO", "interrupt": "INFO", "diverge": "ERROR", "give_up": "ERROR"}


class Wandb:
    """The listener of hlat.tracking.listener.

    Args:
        settings: Where W&B files the run.
        tokens_per_step: Tokens of an optimizer step, for what is known by its step only.
        say: Tells the user a sentence.
    """

    def __init__(
        self, settings: tracking.Wandb, tokens_per_step: int, say: Callable[[str], None]
    ) -> None:
        self._settings, self._say = settings, say
        self._tokens_per_step = tokens_per_step
        self._ending, self._is_full = "", False

    def begin(self, beginning: Beginning) -> None:
        """Open the run: online with a key if the servers answer, else offline.

        Raises:
            OSError: The run folder takes no files.
        """
        self._folder = beginning.folder / "wandb"
        self._folder.mkdir(exist_ok=True)
        # The library would turn to a temporary folder, where nobody looks for it
        probe = self._folder / ".writable"
        probe.touch()
        probe.unlink()
        self._run = self._open(beginning)
        for pattern, axis in _AXES.items():
            self._run.define_metric(pattern, step_metric=axis)
        told = {"code_revision": beginning.code_revision, "attempt": beginning.attempt}
        config: Any = self._run.config  # its methods have no types
        config.update({**beginning.config, **told}, allow_val_change=True)

    def row(self, row: Row) -> None:
        """Log the numbers of a row."""
        self._run.log({"step": row["step"], "tokens": row["tokens"], **scalars(row)})
        self._look_at_disk()

    def event(self, row: Row) -> None:
        """Log the numbers of an event, or alert of it."""
        name, step = row["event"], row["step"]
        if name in _ENDINGS:
            self._ending = name
        if numbers := event_scalars(row):
            place = {"step": step, "tokens": step * self._tokens_per_step}
            self._run.log({**place, **numbers})
        if name in ALERTS:
            title = f"{self._run.name}: {name}"
            self._run.alert(title, sentence(row), _LEVELS.get(name, "WARN"), wait_duration=60)
        if name == "phase":
            self._run.summary["phase"] = row["name"]

    def rewind(self, step: int) -> None:
        """Tell that curves go back; W&B cannot take back what it has been told."""
        self._run.summary["rewound_to"] = step

    def finish(self, summary: Mapping[str, float]) -> None:
        """Write the summary; a run that was interrupted is one that goes on."""
        self._run.summary.update(dict(summary))
        if self._ending == "interrupt":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if self._ending == "finish" else 1)
        self._look_at_disk()
        self._let_go()

    def abandon(self) -> None:
        """End the library's process, for which this one would wait when it exits."""
        for process in _cores():
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        with suppress(Exception):  # it says that its process is gone, in one way or another
            self._let_go()

    def _look_at_disk(self) -> None:
        """Warn once of a full disk, of which the library says nothing to who uses it."""
        if self._is_full or shutil.disk_usage(self._folder).free >= _BLOCK:
            return
        self._is_full = True
        _LOGGER.warning(
            f"the disk of {self._folder} is full, so W&B may lack rows; metrics.jsonl has all that "
            "could be written"
        )

    def _let_go(self) -> None:
        import wandb

        wandb.teardown()

    def _open(self, beginning: Beginning) -> "wandb.Run":
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        mode = os.environ.get("WANDB_MODE", "online")
        why = f"is told to by WANDB_MODE={mode}"
        if mode == "disabled":
            return self._init(beginning, "disabled")
        if mode == "online":
            try:
                if wandb.login(prompt=False):
                    return self._init(beginning, "online")
                why = "has no key (wandb login, or WANDB_API_KEY)"
            except wandb.Error as error:
                why = f"cannot be reached ({str(error).splitlines()[0]})"
        folder = self._folder / f"offline-run-*-{beginning.identity}"
        self._say(f"W&B {why}; the run is kept offline; to send it: wandb sync {folder}")
        return self._init(beginning, "offline")

    def _init(
        self, beginning: Beginning, mode: Literal["online", "offline", "disabled"]
    ) -> "wandb.Run":
        import wandb

        told = self._settings
        return wandb.init(
            project=told.project,
            entity=told.entity,
            group=told.group,
            notes=told.notes,
            job_type=told.job_type,
            tags=told.tags or None,
            id=beginning.identity,
            name=beginning.name,
            resume="allow",
            mode=mode,
            dir=beginning.folder,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                init_timeout=_SECONDS_TO_REACH,
                login_timeout=_SECONDS_TO_REACH,
            ),
        )


def _cores() -> Iterator[int]:
    """The processes of W&B's library that this one has started; none where there is no /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            name, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
            if name == "wandb-core" and int(rest.split()[1]) == os.getpid():
                yield int(stat.parent.name)
