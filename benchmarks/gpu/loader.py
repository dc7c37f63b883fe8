"""Measure the tokens per second of hlat's loader in batches of a shape.

Usage: python benchmarks/gpu/loader.py SHAPE SECONDS

The text is the embedded corpus, which needs no network. Its vocabulary is smaller than that of the
shape.
"""

import sys
import time
from contextlib import closing

from contestants import make_settings
from measure import print_result

from hlat.data.data_loader import build_data_loader

WARM_UP_BATCHES = 5


def main() -> None:
    shape, seconds = sys.argv[1], float(sys.argv[2])
    config = make_settings("ours", shape, "bf16", "cpu").config
    start = time.perf_counter()
    with closing(
        build_data_loader(config.data, config.phase, config.batch, config.run.resolved_data_seed)
    ) as loader:
        for _ in range(WARM_UP_BATCHES):
            loader.next_batch()
        ready = time.perf_counter()
        num_batches = 0
        while time.perf_counter() - ready < seconds:
            loader.next_batch()
            num_batches += 1
        rate = num_batches * config.batch.tokens_per_step / (time.perf_counter() - ready)
    print_result(
        {
            "shape": shape,
            "workers": config.data.workers,
            "tokens_per_second": round(rate),
            "first_batches_seconds": round(ready - start, 2),
        }
    )


if __name__ == "__main__":
    main()
