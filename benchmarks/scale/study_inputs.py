"""Directories of many runs, checkpoints and stages for `studies.py`.

Usage: python -m benchmarks.scale.study_inputs NAME SIZE DIRECTORY

One run is trained, or one of its checkpoints saved, and copied with other names, seeds, learning
rates and results. The functions of hlat write everything that has a checksum or an order.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hlat.tracking import sweep_log

SWEEP_DIR, RUN_NAME = "sweep", "template"
_SEEDS_PER_RATE = 10
_FILES_PER_CHECKPOINT = 4
_NUM_STEPS, _TOKENS_PER_STEP = 20, 2048


def write_runs(size: int, directory: Path) -> None:
    """Write finished runs of 20 steps, and the log of the sweep that they belong to."""
    template = _train_template(directory)
    texts = {name: (template / name).read_text() for name in _RUN_FILES}
    for number in range(size):
        seed, rate = number % _SEEDS_PER_RATE, 1e-4 * (1 + number // _SEEDS_PER_RATE)
        run_dir = directory / "runs" / f"tiny-{number:08x}"
        run_dir.mkdir(parents=True)
        rng = random.Random(number)
        config = _replace_values(texts["config.yaml"], run_dir.name, seed, rate)
        (run_dir / "config.yaml").write_text(config)
        (run_dir / "overrides.yaml").write_text(texts["overrides.yaml"])
        provenance = json.loads(texts["provenance.json"])
        provenance["data"]["run.seed"] = seed
        provenance["identity"]["config"] = f"{number:016x}"
        (run_dir / "provenance.json").write_text(json.dumps(provenance, indent=2))
        for name in ("metrics.jsonl", "events.jsonl"):
            rows = map(json.loads, texts[name].splitlines())
            lines = [json.dumps(_vary(row, rng)) + "\n" for row in rows]
            (run_dir / name).write_text("".join(lines))
        words = [f"run.seed={seed}", f"optimizer.lr={rate:.6g}"]
        sweep_log.log_point(directory / SWEEP_DIR, number, run_dir, words, {})


_RUN_FILES = ("config.yaml", "overrides.yaml", "provenance.json", "metrics.jsonl", "events.jsonl")


def write_checkpoints(size: int, directory: Path) -> None:
    """Write a run with `size` files in its checkpoints; all have the same file of tensors."""
    from hlat.checkpoint import checkpoint_store
    from hlat.checkpoint.checkpoint_directory import create_checkpoint_dir, format_step_name

    run_dir = _train_template(directory)
    source = run_dir / "checkpoints" / format_step_name(_NUM_STEPS)
    manifest = checkpoint_store.load_manifest(source)
    state = checkpoint_store.load_state_json(source)
    files = {name: r for name, r in manifest.files.items() if name.startswith("rank_")}
    os.fsync = lambda _: None  # no power failure is expected here
    for number in range(1, size // _FILES_PER_CHECKPOINT):
        step = _NUM_STEPS + number
        target = source.with_name(format_step_name(step))
        target_dir = create_checkpoint_dir(target)
        assert isinstance(target_dir, Path)
        for name in files:
            os.link(source / name, target_dir / name)
        content = replace(manifest, step=step, files=files)
        checkpoint_store.commit_checkpoint(target_dir, target, content, {**state, "step": step})


def write_chain(size: int, directory: Path) -> None:
    """Write a campaign of training stages that each continue the one before."""
    stages: dict[str, Any] = {}
    for number in range(size):
        stage: dict[str, Any] = {"train": [f"run.steps={number + 1}"]}
        if number:
            stage["start_from"] = f"stage_{number - 1}"
        stages[f"stage_{number}"] = stage
    train = ["schedule=constant", f"schedule.total_steps={size}", "schedule.warmup_steps=1"]
    _write_campaign(directory, {"train": train, "stages": stages})


def write_evaluations(size: int, directory: Path) -> None:
    """Write a campaign of one run and evaluations of `size` of its checkpoints."""
    train = [
        *("schedule=constant", f"schedule.total_steps={size}", "schedule.warmup_steps=1"),
        *("checkpoint.every_steps=1", "checkpoint.keep_every_steps=1"),
    ]
    scores = {"evaluate": "trunk", "every_tokens": _TOKENS_PER_STEP, "tasks": ["piqa"]}
    _write_campaign(directory, {"train": train, "stages": {"trunk": {"train": []}, "s": scores}})


def finish_campaign(directory: Path) -> None:
    """Log the start and the end of all jobs of a campaign, and create their results."""
    from hlat.jobs.campaign_file import load_campaign
    from hlat.jobs.campaign_state import LOCAL, CampaignLog
    from hlat.jobs.stage_expansion import expand_campaign
    from hlat.jobs.stage_job import save_jobs

    os.chdir(directory)
    expanded = expand_campaign(load_campaign(Path("campaign.yaml")))
    expanded.directory.mkdir(parents=True)
    save_jobs(expanded.directory, expanded.jobs)
    log = CampaignLog(expanded.directory)
    for job in expanded.jobs:
        log.append("start", job.name, digest=job.digest, launcher=LOCAL)
        log.append("end", job.name, exit=0)
        Path(job.result).mkdir(parents=True, exist_ok=True)


def _write_campaign(directory: Path, content: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "campaign.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    finish_campaign(directory)


def _train_template(directory: Path) -> Path:
    """Train a small run in `directory`, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [f"run.steps={_NUM_STEPS}", f"run.name={RUN_NAME}", "model.hidden_size=8"]
    words += ["model.num_layers=1", "run.repeat=true", "evaluation.tokens_per_source=2048"]
    command = [sys.executable, "-m", "hlat.train", *words]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    run_dir = directory / "runs" / RUN_NAME
    return run_dir.rename(directory / RUN_NAME)


def _replace_values(config: str, name: str, seed: int, rate: float) -> str:
    """Return the text of a configuration with other values of three keys."""
    values = {("run", "name"): name, ("run", "seed"): seed, ("optimizer", "lr"): f"{rate:.6g}"}
    lines, section = config.splitlines(keepends=True), ""
    for i, line in enumerate(lines):
        if not line.startswith(" "):
            section = line.partition(":")[0]
        key = line.partition(":")[0].strip()
        if line.startswith("  ") and line[2] != " " and (section, key) in values:
            lines[i] = f"  {key}: {values.pop((section, key))}\n"
    assert not values, f"the configuration has no {values}"
    return "".join(lines)


def _vary(value: Any, rng: random.Random, key: str = "") -> Any:
    """Return a row with results that differ by about 1%; counts and times are the same."""
    if isinstance(value, dict):
        return {
            name: _vary(item, rng, name if key != "bits_per_byte" else key)
            for name, item in value.items()
        }
    if isinstance(value, float) and key in (
        "loss",
        "grad_norm",
        "tokens_per_second",
        "bits_per_byte",
    ):
        return value * rng.gauss(1, 0.01)
    return value


INPUTS: dict[str, Callable[[int, Path], None]] = {
    "runs": write_runs,
    "checkpoints": write_checkpoints,
    "chain": write_chain,
    "evaluations": write_evaluations,
}


def main(argv: Sequence[str]) -> None:
    name, size, directory = argv
    INPUTS[name](int(size), Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
