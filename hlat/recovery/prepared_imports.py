"""Imports and compositions of the prepared process, which forks the runs of a sweep.

Modules are imported here that hlat.train imports when a run starts.
"""

import importlib
import json
import os
import sys

from hlat.config.compose import compose_ahead
from hlat.recovery.garbage_collection import pause_garbage_collection
from hlat.recovery.prepared_process import OVERRIDES_VARIABLE

MODULES = (
    *("hlat.train", "hlat.engine.native.native_engine", "hlat.data.data_loader"),
    *("hlat.checkpoint.resume", "hlat.checkpoint.checkpoint_signature"),
    *("hlat.evaluate.heldout_evaluation", "hlat.evaluate.extension_metrics"),
    *("hlat.recovery.fault_tolerance", "hlat.recovery.preflight", "hlat.recovery.run_copy"),
    *("hlat.tracking.tracker", "hlat.tracking.run_summary", "hlat.report.end_report"),
)


os.setsid()  # signals of the terminal must not end the process that waits for the runs
with pause_garbage_collection():
    for name in MODULES:
        importlib.import_module(name)
    del sys.modules["hlat.train"]  # a run executes it as __main__
    compose_ahead(json.loads(os.environ.pop(OVERRIDES_VARIABLE, "[]")))
