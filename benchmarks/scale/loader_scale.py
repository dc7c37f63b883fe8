"""Cost of the data loader of one data-parallel rank of many."""

import json
import time
from dataclasses import replace
from typing import Any

from hydra import compose, initialize_config_dir

from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.data.data_loader import build_data_loader, merge_state_dicts

NUM_STREAMS = 1024
_NUM_BATCHES = 20


def measure_loader() -> dict[str, Any]:
    """Build the loader of one of 1 to 1,024 ranks of 1,024 streams, and read batches."""
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        config = resolve_config(compose("config", ["experiment=quickstart", "data.workers=0"]))
    batch = replace(config.batch, global_batch_size=NUM_STREAMS, micro_batch_size=1)
    rows = []
    for dp in (1, 32, NUM_STREAMS):
        start = time.process_time()
        loader = build_data_loader(config.data, config.phase, batch, 0, dp - 1, dp)
        built = time.process_time() - start
        start = time.process_time()
        for _ in range(_NUM_BATCHES):
            loader.next_batch()
        step = (time.process_time() - start) / _NUM_BATCHES
        state = loader.state_dict()
        loader.close()
        rows.append({
            "dp": dp,
            "streams_of_the_rank": NUM_STREAMS // dp,
            "start_cpu_s": round(built, 3),
            "step_cpu_s": round(step, 5),
            "state_bytes": len(json.dumps(state)),
        })  # fmt: skip
    states = [
        state | {"streams": {str(i): next(iter(state["streams"].values()))}}
        for i in range(NUM_STREAMS)
    ]
    start = time.process_time()
    merged = merge_state_dicts(states)
    merge = time.process_time() - start
    return {
        "ranks": rows,
        "merge_1024_states_cpu_s": round(merge, 4),
        "merged_bytes": len(json.dumps(merged)),
    }
