"""Compare averages of the last checkpoints of a study's runs with each checkpoint.

Usage: PYTHONPATH=. python benchmarks/sweeps/average.py --runs runs   (averaging.json, averaging.md)
       PYTHONPATH=. python benchmarks/sweeps/average.py               (averaging.md from the JSON)

The runs are those of sweeps/averaging.yaml. `python -m hlat.average` writes the averages, and the
engine evaluates them as in training, with the dtypes of the recipe.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.averaging.run import averages, measure
from benchmarks.sweeps.plot import in_markdown, points_of, spread
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.engine.engine_factory import create_engine
from hlat.study.run_record import get_numbers, load_run_record

HERE = Path(__file__).resolve().parent
STUDY = "averaging"
Json = dict[str, Any]


def evaluate_run(run: Path, overrides: list[str]) -> Json:
    """Return the bits per byte by source of a run's last checkpoints and their averages."""
    config = resolve_config(compose_config(overrides))
    engine = create_engine(config)
    engine.build(config)
    found = measure(engine, config, averages(run))
    engine.close()
    bits = {name: values["bits_per_byte"] for name, values in found.items()}
    *_, logged = load_run_record(run).evaluations.values()
    last = next(name for name in reversed(bits) if name.startswith("step"))
    if bits[last] != get_numbers(logged, "bits_per_byte"):
        sys.exit(f"{run}: {last} evaluates to {bits[last]}, but the run logged {logged}")
    return bits


def collect(runs: Path) -> Json:
    """Evaluate all finished runs of the study, by point and seed."""
    result: Json = {}
    for point, seeds in points_of(STUDY).items():
        for seed, name in seeds.items():
            if not (runs / name / "events.jsonl").exists():
                continue
            if load_run_record(runs / name).last_attempt_events[-1]["event"] == "finish":
                overrides = [f"+sweep={STUDY}", point, f"run.seed={seed}"]
                result.setdefault(point, {})[seed] = evaluate_run(runs / name, overrides)
    if not result:
        sys.exit(f"{runs} contains no finished run of {STUDY}; start them with -m +sweep={STUDY}")
    return result


def render(result: Json) -> str:
    """Return a table of checkpoints and sources for each point, with differences within a seed."""
    tables = []
    for point, seeds in result.items():
        rows = list(next(iter(seeds.values())))
        last = next(name for name in reversed(rows) if name.startswith("step"))
        sources = list(seeds[next(iter(seeds))][last])
        lines = [[point, *sources, f"mean, less that of {last}"]]
        for row in rows:
            cells = [
                spread([bits[row][source] for bits in seeds.values()], 4) for source in sources
            ]
            less = [bits[row]["mean"] - bits[last]["mean"] for bits in seeds.values()]
            lines.append([row, *cells, "" if row == last else spread(less, 4)])
        tables.append(in_markdown(lines))
    return "\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="directory of the runs")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    recorded = arguments.output / f"{STUDY}.json"
    if arguments.runs is not None:
        recorded.write_text(json.dumps(collect(arguments.runs)) + "\n")
    table = render(json.loads(recorded.read_text()))
    recorded.with_suffix(".md").write_text(table)
    print(table, end="")


if __name__ == "__main__":
    main()
