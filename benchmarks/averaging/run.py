"""Compare averages of a run's last checkpoints with each checkpoint, on held-out text.

Usage: PYTHONPATH=. python benchmarks/averaging/run.py [--runs DIR] [--seeds N]
       PYTHONPATH=. python benchmarks/averaging/run.py --render   (tables from result.json)

Trains a run for each final learning rate, and evaluates its last checkpoints and their averages
with the engine on the held-out text. A seed needs about ten minutes of one core. Existing runs in
DIR are not trained again.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from benchmarks.common import describe_machine, machine, table, write_between
from hlat.checkpoint import checkpoint_store
from hlat.config.compose import register_configs
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.data_loader import build_data_loader
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine
from hlat.evaluate import heldout_evaluation
from hlat.evaluate.heldout_loss import summarize
from hlat.optim.lr_schedule import compute_lr

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]
STEPS, SPACING, NUM_SINGLE = 1200, 40, 5
RUN = [
    "experiment=small_study",
    f"run.steps={STEPS}",
    f"checkpoint.every_steps={SPACING}",
    f"checkpoint.keep_last={NUM_SINGLE}",
    "evaluation.every_steps=400",
]
ENDS = {
    "zero": [f"schedule.total_steps={STEPS}"],
    # As for HLAT-70B, ends at 429/500 of a cosine that is clamped at a tenth of the peak
    "tenth": ["schedule.name=hlat", "schedule.min_lr_ratio=0.1", "schedule.total_steps=1400"],
    "constant": [
        "schedule.name=constant",
        "schedule.min_lr_ratio=null",
        f"schedule.total_steps={STEPS}",
    ],
}
TITLES = {
    "zero": "The learning rate decays linearly to zero, as in `experiment=small_study`",
    "tenth": "The learning rate decays to a tenth of the peak, as for HLAT-70B",
    "constant": "The learning rate is constant",
}
AVERAGES = (2, 3, 5)
SEEDS = (12349, 1, 2)
LAST = f"step {STEPS}"


def train(run: Path, overrides: list[str]) -> None:
    """Train a run if it does not exist."""
    if not (run / "checkpoints" / checkpoint_store.format_step_name(STEPS)).exists():
        name = [f"run.root={run.parent}", f"run.name={run.name}"]
        subprocess.run([sys.executable, "-m", "hlat.train", *overrides, *name], check=True)


def averages(run: Path) -> dict[str, Path]:
    """Return the paths of the last checkpoints and of their averages by label."""
    last = sorted((run / "checkpoints").glob("step_*"))[-NUM_SINGLE:]
    found = {f"step {checkpoint_store.parse_step(path)}": path for path in last}
    for count in AVERAGES:
        path = run / "averages" / f"last_{count}"
        if not path.exists():
            arguments = [str(run), f"last={count}", f"--output={path}"]
            subprocess.run([sys.executable, "-m", "hlat.average", *arguments], check=True)
        found[f"average of the last {count}"] = path
    return found


def measure(engine: Engine, config: Config, paths: dict[str, Path]) -> dict[str, Json]:
    """Return the held-out loss and bits per byte of each checkpoint by source."""
    loader = build_data_loader(
        config.data, config.phase, config.batch, config.run.resolved_data_seed
    )
    num_sequences = config.evaluation.count_sequences(config.batch.sequence_length)
    sequences = loader.build_heldout_sequences(num_sequences)
    results = {}
    for name, path in paths.items():
        checkpoint_store.load_checkpoint(
            path, [c for c in engine.state_shards() if c.name.startswith("weights/")]
        )
        fields = summarize(heldout_evaluation.evaluate_sources(engine, sequences))
        results[name] = {key: fields[key] for key in ("loss", "bits_per_byte")}
    loader.close()
    return results


def measure_end(end: str, runs: Path, seeds: tuple[int, ...]) -> Json:
    """Train, average and evaluate with one final learning rate."""
    overrides = [*RUN, *ENDS[end]]
    result: Json = {"overrides": overrides, "seeds": {}}
    for seed in seeds:
        run, seeded = runs / f"{end}_{seed}", [*overrides, f"run.seed={seed}"]
        train(run, seeded)
        with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
            config = resolve_config(compose("config", seeded))
        engine = create_engine(config)
        engine.build(config)
        result["rates"] = {"peak": config.optimizer.lr, "last": compute_lr(STEPS - 1, config)}
        result["seeds"][seed] = measure(engine, config, averages(run))
        engine.close()
    return result


def bits(found: Json, name: str, source: str) -> list[float]:
    """Return the bits per byte of a checkpoint for each seed."""
    return [seed[name]["bits_per_byte"][source] for seed in found["seeds"].values()]


def relative_to_last(found: Json, name: str) -> str:
    """Format the difference to the last checkpoint: mean and standard deviation over seeds."""
    pairs = zip(bits(found, name, "mean"), bits(found, LAST, "mean"), strict=True)
    differences = [value - last for value, last in pairs]
    spread = f" ± {statistics.stdev(differences):.4f}" if len(differences) > 1 else ""
    return "" if name == LAST else f"{statistics.mean(differences):+.4f}{spread}"


def render(result: Json) -> str:
    """Return a table of checkpoints and sources for each final learning rate, as in Table IV."""
    parts = []
    for end, found in result["ends"].items():
        rows = next(iter(found["seeds"].values()))
        sources = list(rows[LAST]["bits_per_byte"])
        cells = [
            [
                name,
                *(f"{statistics.mean(bits(found, name, source)):.4f}" for source in sources),
                relative_to_last(found, name),
            ]
            for name in rows
        ]
        rates = "{peak:g} at the peak, {last:.2g} at the last step".format(**found["rates"])
        header = ["bits per byte", *sources, f"mean, relative to {LAST}"]
        parts += [f"{TITLES[end]} ({rates}):", table(header, cells)]
    return "\n\n".join([*parts, machine(result)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="directory of the runs; default: a temporary one")
    parser.add_argument("--seeds", type=int, choices=range(1, len(SEEDS) + 1), default=1)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    recorded = HERE / "result.json"
    if not arguments.render:
        with tempfile.TemporaryDirectory() as temporary:
            runs = (arguments.runs or Path(temporary)).absolute()
            register_configs()
            ends = {end: measure_end(end, runs, SEEDS[: arguments.seeds]) for end in ENDS}
        result = {"ends": ends, "machine": describe_machine(["torch"])}
        recorded.write_text(json.dumps(result, indent=1) + "\n")
    tables = render(json.loads(recorded.read_text()))
    write_between(HERE / "README.md", "averaging", tables)


if __name__ == "__main__":
    main()
