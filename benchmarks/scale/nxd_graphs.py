"""Compare the graphs of NxD's ranks, steps and restarts for several layouts.

    PYTHONPATH=.:$NXD_SOURCE/src .venv-nxd/bin/python benchmarks/scale/nxd_graphs.py [LAYOUT ...]

A process per rank traces a run, and a second one that starts with a restore; nothing is executed
(tests/nxd/support/graphs.py). Print a row of a Markdown table per layout.
"""

import sys
from typing import Any

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from tests.distributed import checks
from tests.nxd.support.ranks import run

LAYOUTS = {
    f"tp{tp}{suffix}": f"tp={tp} {settings}".split()
    for suffix, settings in {
        "+sp": "sequence_parallel=true",
        "+pp2": "pp=2",
        "+dp2": "dp=2",
        "+dp2+zero1": "dp=2 zero=1",
    }.items()
    for tp in (2, 4, 8)
}
SHAPE = ("model.num_attention_heads=8", "model.vocab_size=136", "model.num_layers=4")
PHASES = ("check", "build", "evaluate", "step", "read", "save")
COLUMNS = ("layout", "ranks", "variants", "graphs of a rank", *PHASES, "untraced at a restart")

Phase = tuple[str, list[str], int]


def main() -> None:
    """Print the table."""
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}", flush=True)
    for name in sys.argv[1:] or LAYOUTS:
        settings = [f"parallelism.{setting}" for setting in LAYOUTS[name]]
        size = f"batch.micro_batch_size={2 if 'dp2' in name else 4}"
        overrides = (*checks.MODEL, *SHAPE, "engine=nxd", "precision=fp32", size, *settings)
        config = resolve_config(compose_config(overrides))
        node: Any = {"LOCAL_WORLD_SIZE": str(config.parallelism.tp)}  # one tensor-parallel group
        first, restart = (
            run(config.num_processes, "graphs.graphs", config, start, mode="graphs", **node)
            for start in ("first", "restart")
        )
        row = (
            name,
            len(first),
            count_variants(first, config.parallelism.pp),
            len(list_graphs(first[0])),
            *(count_graphs(first[0], phase) for phase in PHASES),
            max(
                len(list_graphs(after) - list_graphs(before))
                for before, after in zip(first, restart, strict=True)
            ),
        )
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def count_variants(ranks: list[list[Phase]], pp: int) -> int:
    """Return the number of different sets of graphs in a pipeline stage, of the stage with most."""
    size = len(ranks) // pp
    stages = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return max(len({frozenset(list_graphs(rank)) for rank in stage}) for stage in stages)


def list_graphs(phases: list[Phase]) -> set[str]:
    """Return the different graphs of a rank."""
    return {digest for _, digests, _ in phases for digest in digests}


def count_graphs(phases: list[Phase], name: str) -> int:
    """Return the number of graphs that the last phase with this name executes."""
    return [len(set(digests)) for phase, digests, _ in phases if phase == name][-1]


if __name__ == "__main__":
    main()
