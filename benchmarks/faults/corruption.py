"""Measure which checkpoint formats detect a damaged file.

Usage: python benchmarks/faults/corruption.py [--flips 200] [--others 60]

Each format saves the same state at two steps. Each trial damages one file of a new copy of the
newer checkpoint and loads it. Writes result.json and the tables of README.md.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import describe_machine, machine, table, write_between
from benchmarks.faults import damage
from benchmarks.faults.contestants import ALL, Contestant, State
from hlat.checkpoint.checkpoint_store import format_step_name
from tests.support.newest_checkpoint import find_newest_valid

HERE = Path(__file__).resolve().parent
LIBRARIES = ["torch", "safetensors", "orbax-checkpoint", "tensorstore", "jax"]
OUTCOMES = ("noticed", "silently wrong", "harmless")


def make_state(step: int) -> State:
    """Return weights and two moments of some layers, 0.6 MB, without zeros."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"embed": (256, 64), "attention": (64, 192), "mlp": (64, 344), "norm": (64,)}
    return {
        f"{kind}.{name}": torch.randn(shape, generator=generator)
        for kind in ("weights", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


def is_equal(found: State, expected: State) -> bool:
    """Return True if names, dtypes, shapes and bits of all tensors are equal."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].numpy().tobytes() == tensor.numpy().tobytes()
        for name, tensor in expected.items()
    )


def load_damaged(contestant: Contestant, folder: Path, expected: State) -> str:
    """Load a damaged checkpoint and return one of `OUTCOMES`."""
    try:
        found = contestant.load(folder, expected)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the error of torch.distributed.checkpoint is not an Exception
        return "noticed"
    return "harmless" if is_equal(found, expected) else "silently wrong"


class Trials:
    """Two checkpoints of a format; each trial damages a copy of the newer one."""

    def __init__(self, contestant: Contestant, root: Path) -> None:
        self.contestant = contestant
        self.root = root / "checkpoints"
        self.older, self.newer = (self.root / format_step_name(step) for step in (1, 2))
        for step, folder in ((1, self.older), (2, self.newer)):
            contestant.save(folder, step, make_state(step))
        self._original = root / "kept"
        shutil.copytree(self.newer, self._original)
        assert is_equal(contestant.load(self.newer, make_state(2)), make_state(2))

    def files(self) -> list[Path]:
        """Return the relative paths of the files of the newer checkpoint."""
        return [path.relative_to(self.newer) for path in damage.files(self.newer)]

    def run(
        self, fault: str, count: int, choose: Callable[[random.Random], Path]
    ) -> dict[str, int]:
        """Damage and load `count` times; count outcomes, and for hlat resumes from the older."""
        expected, counts = make_state(2), Counter[str]()
        rng = random.Random(f"{fault} {count}")
        for _ in range(count):
            shutil.rmtree(self.newer)
            shutil.copytree(self._original, self.newer)
            damage.KINDS[fault][0](choose(rng), self.older, rng)
            counts[load_damaged(self.contestant, self.newer, expected)] += 1
            if self.contestant.name == "hlat":
                counts["previous used"] += self._previous_is_used()
        shutil.rmtree(self.newer)
        shutil.copytree(self._original, self.newer)
        return dict(counts)

    def _previous_is_used(self) -> bool:
        """Return True if a resume loads the older checkpoint and logs why it rejects the newer."""
        found, rejected = find_newest_valid(self.root)
        is_logged = len(rejected) == 1 and f"{self.newer.name} is rejected: " in rejected[0]
        return (
            is_logged
            and found == self.older
            and is_equal(self.contestant.load(found, make_state(1)), make_state(1))
        )


def measure(num_flips: int, num_others: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the outcomes by format and damage, and for hlat by file and damage."""
    rows, by_file = [], []
    for make in ALL:
        contestant = make()
        with tempfile.TemporaryDirectory() as root:
            trials = Trials(contestant, Path(root))
            for fault, count in damage.trials(num_flips, num_others):
                choose = damage.KINDS[fault][1]
                counts = trials.run(fault, count, partial(choose, trials.newer))
                rows.append({"format": contestant.name, "damage": fault, "trials": count} | counts)
                print(*rows[-1].values(), flush=True)
            if contestant.name != "hlat":
                continue
            for file in trials.files():
                for fault, count in damage.trials(num_flips, num_others):
                    counts = trials.run(fault, count, partial(_constant, trials.newer / file))
                    by_file.append({"file": str(file), "damage": fault, "trials": count} | counts)
    return rows, by_file


def _constant(file: Path, rng: random.Random) -> Path:
    return file


def render(result: dict[str, Any]) -> str:
    """Return the table of formats with detected and silently wrong trials."""
    formats = list(dict.fromkeys(row["format"] for row in result["formats"]))
    lines = []
    for fault in damage.KINDS:
        cells = {row["format"]: _cell(row) for row in result["formats"] if row["damage"] == fault}
        lines.append([fault, *(cells[name] for name in formats)])
    return f"{table(['damage', *formats], lines)}\n\n{machine(result)}"


def render_files(result: dict[str, Any]) -> str:
    """Return the table of hlat's files with detected trials and resumes from the older."""
    names = list(dict.fromkeys(row["file"] for row in result["files"]))
    lines = []
    for fault in damage.KINDS:
        cells = {row["file"]: row for row in result["files"] if row["damage"] == fault}
        counts = [
            f"{cells[name].get('noticed', 0)}, {cells[name]['previous used']} of "
            f"{cells[name]['trials']}"
            for name in names
        ]
        lines.append([fault, *counts])
    return table(["damage", *names], lines)


def _cell(row: dict[str, Any]) -> str:
    wrong = row.get("silently wrong", 0)
    detected = f"{row.get('noticed', 0)} of {row['trials']}"
    return f"{detected}, **{wrong} silently wrong**" if wrong else detected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--others", type=int, default=60)
    parser.add_argument("--output", type=Path, default=HERE / "result.json")
    arguments = parser.parse_args()
    rows, by_file = measure(arguments.flips, arguments.others)
    result = {
        "machine": describe_machine(LIBRARIES),
        "protocol": {"flips": arguments.flips, "others": arguments.others},
        "formats": rows,
        "files": by_file,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "formats", render(result))
    write_between(HERE / "README.md", "files", render_files(result))


if __name__ == "__main__":
    main()
