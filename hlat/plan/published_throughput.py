"""Published throughputs on trn1, as overrides of `hlat plan` (published_throughput.yaml)."""

from pathlib import Path
from typing import NamedTuple

from hlat.config.untrusted_files import load_untrusted_yaml

COMMON_OVERRIDES = ("hardware=trn1_32xl", "engine=nxd", "compiler=neuron_2_28")
"""Overrides of all rows; hardware.nodes is added."""


class PublishedRun(NamedTuple):
    """Published configuration, with one value of the speed per release of the Neuron SDK.

    `nodes` are trn1.32xlarge instances; `fitted` is True if the constants were fitted to the row.
    """

    name: str
    nodes: int
    overrides: list[str]
    sequences_per_second: list[float]
    fitted: bool = False


def _load_published_runs() -> tuple[PublishedRun, ...]:
    rows = load_untrusted_yaml(Path(__file__).with_suffix(".yaml"))
    for row in rows:
        if "mfu" in row:
            row["sequences_per_second"] = [_compute_speed_of_7b(row.pop("mfu"), row["nodes"])]
    return tuple(PublishedRun(**row) for row in rows)


def _compute_speed_of_7b(mfu: float, nodes: int) -> float:
    """Return sequences/s of HLAT-7B: 42.86 GF per token, 4,096 tokens, 3,040 TFLOP/s per node."""
    return mfu * nodes * 3040e12 / (42.86e9 * 4096)


PUBLISHED_RUNS = _load_published_runs()
