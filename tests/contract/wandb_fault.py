"""Log to W&B during a fault: `python wandb_fault.py WHAT FOLDER`.

Print the seconds of logging and finishing.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from hlat.config.batch import BatchConfig
from hlat.config.tracking import WandbConfig as Settings
from hlat.tracking import async_logger
from hlat.tracking.async_logger import AsyncLogger
from hlat.tracking.metric_logger import RunInfo
from hlat.tracking.wandb_logger import WandbLogger, _find_wandb_core_pids

ROWS = 2000
BATCH = BatchConfig(global_batch_size=1, micro_batch_size=1, sequence_length=512)
SIGNALS = {"killed": signal.SIGKILL, "hangs": signal.SIGSTOP}


def main(what: str, folder: Path) -> None:
    logging.basicConfig(format="%(name)s %(message)s", level=logging.WARNING)
    if what == "hangs":
        async_logger._FINISH_TIMEOUT_S = 1.0
    beside = AsyncLogger("W&B", WandbLogger(Settings(), BATCH, print))
    beside.start(RunInfo(folder, "x", "abcd1234", 1, 0, ROWS, {}, None))
    while not [file for file in folder.glob("wandb/*/*.wandb") if file.stat().st_size]:
        time.sleep(0.02)
    if what in SIGNALS:
        (process,) = _find_wandb_core_pids()
        os.kill(process, SIGNALS[what])
    begin = time.perf_counter()
    for step in range(1, ROWS):
        row = {"step": step, "tokens": 512 * step, "loss": 1.0, "time": 0.0, "attempt": 1}
        beside.log_metrics(row)
    logged = time.perf_counter()
    beside.finish({"step": float(ROWS)})
    print(json.dumps({"rows": logged - begin, "finish": time.perf_counter() - logged}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
