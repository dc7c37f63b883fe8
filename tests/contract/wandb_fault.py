"""A process that logs to W&B while something happens to it: `python wandb_fault.py WHAT FOLDER`.

Prints how many seconds logging and finishing took.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from hlat.config.tracking import Wandb as Settings
from hlat.tracking import aside
from hlat.tracking.aside import Aside
from hlat.tracking.listener import Beginning
from hlat.tracking.wandb import Wandb, _cores

ROWS = 2000
SIGNALS = {"killed": signal.SIGKILL, "hangs": signal.SIGSTOP}


def main(what: str, folder: Path) -> None:
    logging.basicConfig(format="%(name)s %(message)s", level=logging.WARNING)
    if what == "hangs":
        aside._SECONDS_TO_FINISH = 1.0
    beside = Aside("W&B", Wandb(Settings(), 512, print))
    beside.begin(Beginning(folder, "x", "abcd1234", 1, 0, ROWS, {}, None))
    while not [file for file in folder.glob("wandb/*/*.wandb") if file.stat().st_size]:
        time.sleep(0.02)
    if what in SIGNALS:
        (process,) = _cores()
        os.kill(process, SIGNALS[what])
    begin = time.perf_counter()
    for step in range(1, ROWS):
        row = {"step": step, "tokens": 512 * step, "loss": 1.0, "time": 0.0, "attempt": 1}
        beside.row(row)
    logged = time.perf_counter()
    beside.finish({"step": float(ROWS)})
    print(json.dumps({"rows": logged - begin, "finish": time.perf_counter() - logged}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
