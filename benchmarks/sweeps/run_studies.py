"""Run studies of sweeps/ one after the other: plan, sweep, and tables and figures of the result.

Usage: PYTHONPATH=. python benchmarks/sweeps/run_studies.py [STUDY ...] [--jobs 2] [--hours 2]
       [--quick] (writes NAME.json, NAME.md and the figures; --quick writes to build/studies)

Repeat the command to continue after --hours or Ctrl-C; finished runs are not trained again. --quick
checks each study with a few steps, two seeds and three learning rates, and prints the difference
that the full study can detect.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STUDIES = (
    *("beta2", "beta2_contrasts", "precision", "init", "weight_decay", "qk_norm", "z_loss"),
    *("warmup", "upsampling", "averaging", "parallelism", "search"),
)
"""Studies of the paper's claims, and those of the same kind."""
QUICK = {
    "run.steps": "20",
    "checkpoint.every_steps": "20",
    "evaluation.tokens_per_source": "2048",
    "study.lr_grid.below": "1",
    "study.lr_grid.above": "1",
}
QUICK_SEEDS = {"run.seed": "1,2"}
QUICK_OF_STUDY = {
    "averaging": {"run.steps": "34", "checkpoint.every_steps": "2", **QUICK_SEEDS},
    "search": {"hydra.sweeper.trials": "2"},
}
OWN_SCRIPTS = {"averaging": ["average.py"], "parallelism": ["layouts.py"]}
"""Scripts of studies that do more than comparing the metrics of runs."""
SEPARATE = ("parallelism",)
"""Studies of throughput, whose runs do not share the machine."""
DIVERGED, PREEMPTED = 3, 75
"""Exit codes of a sweep after which the next study starts, and after which it does not."""


def build_sweep_command(study: str, root: Path, options: argparse.Namespace) -> list[str]:
    """Return the command that trains all runs of a study."""
    jobs = 1 if study in SEPARATE else options.jobs
    words = [
        f"+sweep={study}",
        f"run.root={root}",
        f"hydra.sweep.dir={root}/sweeps/{study}",
        f"hydra.launcher.jobs={jobs}",
    ]
    if options.quick:
        settings = QUICK | QUICK_OF_STUDY.get(study, QUICK_SEEDS)
        words += [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "hlat", "sweep", *words]


def run_until(command: list[str], deadline: float) -> int:
    """Run a command, interrupt it at the deadline, and return its exit code."""
    process = subprocess.Popen(command)
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
        return PREEMPTED


def record(study: str, root: Path, output: Path) -> None:
    """Write the tables and figures of a study."""
    output.mkdir(parents=True, exist_ok=True)
    script = OWN_SCRIPTS.get(study, ["record_study.py", study])
    words = ["--runs", f"{root}/sweeps/{study}", "--output", str(output)]
    command = [sys.executable, str(HERE / script[0]), *script[1:], *words]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs")
    parser.add_argument("--hours", type=float, default=float("inf"), help="interrupt after hours")
    parser.add_argument("--quick", action="store_true", help="check the studies with short runs")
    parser.add_argument("--root", type=Path, help="directory of the runs")
    options = parser.parse_args()
    if unknown := {*options.studies} - {*STUDIES}:
        parser.error(f"unknown studies {', '.join(unknown)}; choose of {', '.join(STUDIES)}")
    build = Path("build/studies")
    root = options.root or (build / "runs" if options.quick else Path("runs"))
    start = time.monotonic()
    for study in options.studies or STUDIES:
        print(f"\n{study}", flush=True)
        subprocess.run([sys.executable, "-m", "hlat", "plan", f"+sweep={study}"], check=False)
        command = build_sweep_command(study, root, options)
        code = run_until(command, start + 3600 * options.hours)
        if code not in (0, DIVERGED):
            if code == PREEMPTED:
                print("interrupted; repeat the command to continue", file=sys.stderr)
            sys.exit(code)
        if study != "search":
            record(study, root, build if options.quick else HERE)
    print(f"\n{(time.monotonic() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
