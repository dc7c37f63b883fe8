"""Cost of start-up, save and resume of 8,192 ranks on the host, simulated on one machine.

    PYTHONPATH=. python benchmarks/scale/run.py LABEL [NAME ...]

LABEL names the file in results/, such as before or after; NAME selects measurements.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from benchmarks.common import describe_machine, machine, table, write_between
from benchmarks.scale import checkpoint_scale, loader_scale, rendezvous_scale
from benchmarks.scale.simulated_ranks import SimulatedRun
from hlat.config import compose as composition
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.distributed.mesh_coordinates import ParallelDegrees

HERE = Path(__file__).resolve().parent
DEGREES = ParallelDegrees(dp=32, tp=32, pp=8)


def build_run(num_layers: int | None = None) -> SimulatedRun:
    """Return the 70B run on 256 nodes, or one with fewer layers."""
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        overrides = ["model=70b", "hardware=trn1_32xl", "hardware.nodes=256"]
        model = resolve_config(compose("config", overrides)).model
    return SimulatedRun(replace(model, num_layers=num_layers or model.num_layers), DEGREES)


def measure_commit_of_8_layers() -> dict[str, Any]:
    """Commit a tenth of the tensors with the check of the slices."""
    with tempfile.TemporaryDirectory() as folder:
        return checkpoint_scale.measure_commit(build_run(8), Path(folder) / "c", check=True)


def measure_commit_without_check() -> dict[str, Any]:
    """Commit all tensors without the check of the slices, then resume as rank 0 and as the last."""
    return _measure_commit_and_resume(check=False)


def measure_commit() -> dict[str, Any]:
    """Commit all tensors, then resume as rank 0 and as the last rank."""
    return _measure_commit_and_resume(check=True)


def _measure_commit_and_resume(check: bool) -> dict[str, Any]:
    run = build_run()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "c"
        commit = checkpoint_scale.measure_commit(run, directory, check)
        print(json.dumps(commit), file=sys.stderr)
        last = run.degrees.world_size - 1
        resume = [checkpoint_scale.measure_resume(run, directory, rank) for rank in (0, last)]
    return {"commit": commit, "resume": resume}


def measure_rendezvous() -> dict[str, Any]:
    """Connect 8,192 clients to one store and exchange addresses."""
    return rendezvous_scale.measure_rendezvous(DEGREES)


MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "commit_8_layers": measure_commit_of_8_layers,
    "without_check": measure_commit_without_check,
    "checkpoint": measure_commit,
    "rendezvous": measure_rendezvous,
    "loader": loader_scale.measure_loader,
}


def render(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the table of the README."""
    commits = [before["without_check"]["commit"], after["checkpoint"]["commit"]]
    checks = [results["commit_8_layers"]["of_which_check_cpu_s"] for results in (before, after)]
    rest = [commit["rank0_cpu_s"] - (commit["of_which_check_cpu_s"] or 0) for commit in commits]
    resumes = [before["without_check"]["resume"], after["checkpoint"]["resume"]]
    rows = [
        ["commit without the check of the slices", *(f"{value:.1f} s" for value in rest)],
        ["check of the slices, 8 of 80 layers", *(f"{value:.2f} s" for value in checks)],
        ["commit with the check, 80 layers", "not measured", f"{commits[1]['rank0_cpu_s']:.1f} s"],
        ["records received by rank 0", *(_format_mb(one["gathered_bytes"]) for one in commits)],
        ["manifest", *(_format_mb(one["manifest_bytes"]) for one in commits)],
        ["peak memory of the simulation", *(_format_mb(one["peak_rss_bytes"]) for one in commits)],
    ]
    for rank, name in enumerate(("rank 0", "the last rank")):
        rows += [
            [f"resume plan of {name}", *(f"{one[rank]['cpu_s']:.1f} s" for one in resumes)],
            [
                f"metadata read by {name}",
                *(_format_mb(one[rank]["metadata_bytes_read"]) for one in resumes),
            ],
        ]
    lines = [table(["CPU seconds of one rank", "before", "after"], rows)]
    return "\n\n".join([*lines, _render_start_up(after), machine(after["checkpoint"])])


def _render_start_up(after: dict[str, Any]) -> str:
    """Return the tables of the rendezvous and of the data loader."""
    rendezvous = after["rendezvous"]
    phases = [[name, f"{seconds:.1f} s"] for name, seconds in rendezvous["seconds"].items()]
    full = "request of one rank for the addresses of all, as for a full mesh"
    phases.append([full, f"{rendezvous['full_mesh_read_of_one_rank_s']:.2f} s"])
    streams = [
        [str(row["dp"]), f"{row['start_cpu_s']:.2f} s", f"{row['step_cpu_s'] * 1e3:.1f} ms"]
        for row in after["loader"]["ranks"]
    ]
    loader = table(["data-parallel ranks of 1,024 streams", "start", "batch"], streams)
    clients = f"rendezvous of {rendezvous['clients']:,} clients"
    return f"{table([clients, 'time'], phases)}\n\n{loader}"


def _format_mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def main() -> None:
    composition.register_configs()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("label")
    parser.add_argument("names", nargs="*", default=[*MEASUREMENTS], metavar="NAME")
    arguments = parser.parse_args()
    path = HERE / "results" / f"{arguments.label}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    for name in arguments.names:
        measured = MEASUREMENTS[name]()
        print(f"{name}: {json.dumps(measured)}")
        results[name] = measured | {"revision": commit, "machine": describe_machine(["torch"])}
    path.write_text(json.dumps(results, indent=1) + "\n")
    before, after = (
        json.loads((HERE / "results" / f"{label}.json").read_text())
        for label in ("before", "after")
    )
    write_between(HERE / "README.md", "table", render(before, after))


if __name__ == "__main__":
    main()
