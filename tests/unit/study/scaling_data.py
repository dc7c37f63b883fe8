"""Synthetic points of a law of parameters and tokens, and runs with such losses."""

import json
from itertools import product
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from hlat.config.compose import compose_config
from hlat.study.power_law import Array

CONSTANTS = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
"""Constants of Hoffmann et al. (arXiv 2203.15556, equation 10)."""


def build_inputs(num_sizes: int = 8, num_tokens: int = 8) -> Array:
    """Return a grid of parameters and tokens [2, points]."""
    sizes, tokens = np.geomspace(1e7, 1e10, num_sizes), np.geomspace(1e9, 1e12, num_tokens)
    return np.stack([each.ravel() for each in np.meshgrid(sizes, tokens, indexing="ij")])


def compute_losses(inputs: Array) -> Array:
    """Return the losses of the law."""
    parameters, tokens = inputs
    first = CONSTANTS["A"] / parameters ** CONSTANTS["alpha"]
    return np.asarray(CONSTANTS["E"] + first + CONSTANTS["B"] / tokens ** CONSTANTS["beta"])


def sample_losses(inputs: Array, std: float, seed: int) -> Array:
    """Return losses with Gaussian errors of their logarithm."""
    errors = np.random.default_rng(seed).normal(0, std, inputs.shape[1])
    return np.asarray(compute_losses(inputs) * np.exp(errors))


def write_runs(root: Path, num_tokens: int = 3, epochs: float = 0.5) -> list[Path]:
    """Write finished runs of three sizes and two seeds below a root; return them."""
    run_dirs = []
    for hidden_size in (64, 128, 256):
        settings = ["model=tiny", f"model.hidden_size={hidden_size}", "run.name=x"]
        config = OmegaConf.to_yaml(compose_config(settings))
        for steps, seed in product(range(1, 1 + num_tokens), (1, 2)):
            name = f"h{hidden_size}-{steps}-{seed}"
            run_dirs.append(root / name)
            text = config.replace("seed: 12349", f"seed: {seed}")
            tokens = 10**8 * 4**steps
            bits = float(compute_losses(np.array([[1e3 * hidden_size**2], [tokens]]))[0])
            write_run(root / name, text, tokens, bits + seed / 1000 + steps / 3000, epochs)
    return run_dirs


def write_run(run_dir: Path, config: str, tokens: int, bits: float, epochs: float) -> None:
    """Write a finished run with its configuration, tokens and held-out bits per byte."""
    run_dir.mkdir(parents=True)
    common = {"step": 5, "attempt": 1, "time": 2000.0}
    stage = {"name": "main", "sources": {"text": {"tokens": tokens, "epochs": epochs}}}
    events = [
        {"event": "start", "step": 0, "attempt": 1, "time": 1000.0, "began": 999.0},
        common | {"event": "evaluate", "bits_per_byte": {"text": bits, "mean": bits}},
        common | {"event": "ledger", "stages": [stage]},
        common | {"event": "finish"},
    ]
    row = {"step": 5, "tokens": tokens, "loss": 2 * bits, "time": 1990.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run_dir / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (run_dir / "config.yaml").write_text(config)
    (run_dir / "provenance.json").write_text("{}")
