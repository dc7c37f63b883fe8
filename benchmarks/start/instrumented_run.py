"""Train one step, and print the processor time of the parts of the run as JSON.

Usage: PYTHONPATH=CHECKOUT python instrumented_run.py OVERRIDE ...
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

seconds: dict[str, float] = {"python": time.process_time()}
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in hlat.config.entry_point

import torch  # noqa: E402, F401 (its import is measured)

seconds["torch"] = time.process_time()


def time_calls(module: str, name: str, key: str) -> None:
    """Record the start of the first call of a function, and its processor time in all calls."""
    owner: Any = importlib.import_module(module)
    *classes, attribute = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    call: Callable[..., Any] = getattr(owner, attribute)

    def timed(*arguments: Any, **keywords: Any) -> Any:
        start = time.process_time()
        seconds.setdefault(f"{key} started", start)
        try:
            return call(*arguments, **keywords)
        finally:
            elapsed = time.process_time() - start
            seconds.setdefault(f"first {key}", elapsed)
            seconds[key] = seconds.get(key, 0.0) + elapsed

    setattr(owner, attribute, timed)


def main() -> None:
    import hlat.train
    from hlat.config import entry_point

    train = hlat.train
    run_worker = train.run_worker

    def run(*arguments: Any) -> Any:
        time_calls("hlat.engine.native.native_engine", "NativeEngine.train_step", "step")
        time_calls("hlat.data.data_loader", "build_data_loader", "data")
        time_calls("hlat.evaluate.heldout_evaluation", "evaluate_heldout", "evaluation")
        time_calls("hlat.recovery.fault_tolerance", "FaultTolerance.save", "save")
        try:
            time_calls("hlat.report.end_report", "try_write_report", "report")
        except ModuleNotFoundError:  # the report is imported at the start of a run
            start = time.process_time()
            time_calls("hlat.report.report_writer", "try_write_report", "report")
            seconds["early import of the report"] = time.process_time() - start
        return run_worker(*arguments)

    train.run_worker = run  # type: ignore[assignment]
    output, sys.stdout = sys.stdout, sys.stderr
    try:
        entry_point.run_entry_point(train.main)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.stdout = output
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
