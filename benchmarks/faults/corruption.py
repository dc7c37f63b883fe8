"""Which checkpoint formats notice that a file was damaged, and which load it as if nothing were.

Usage: python benchmarks/faults/corruption.py [--flips 200] [--others 60]

Every format saves the same state at two steps; then, again and again, one file of a fresh copy of
the newer checkpoint is damaged and the checkpoint loaded. Writes result.json beside itself, and
the tables of README.md.
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
from hlat.checkpoint.retention import find_newest_valid

HERE = Path(__file__).resolve().parent
LIBRARIES = ["torch", "safetensors", "orbax-checkpoint", "tensorstore", "jax"]
OUTCOMES = ("noticed", "silently wrong", "harmless")


def make_state(step: int) -> State:
    """Weights and two moments of a few layers, 0.6 MB: values as training has them, no zeros."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"embed": (256, 64), "attention": (64, 192), "mlp": (64, 344), "norm": (64,)}
    return {
        f"{kind}.{name}": torch.randn(shape, generator=generator)
        for kind in ("weights", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


def same(found: State, expected: State) -> bool:
    """Whether every tensor is there, of the right dtype and shape, with the right bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].numpy().tobytes() == tensor.numpy().tobytes()
        for name, tensor in expected.items()
    )


def outcome(contestant: Contestant, folder: Path, expected: State) -> str:
    """What came of loading a damaged checkpoint."""
    try:
        found = contestant.load(folder, expected)
    except KeyboardInterrupt:
        raise
    except BaseException:  # torch.distributed.checkpoint raises what is no Exception
        return "noticed"
    return "harmless" if same(found, expected) else "silently wrong"


class Bench:
    """Two checkpoints of a format, the newer of which is damaged and put back."""

    def __init__(self, contestant: Contestant, root: Path) -> None:
        self.contestant = contestant
        self.root = root / "checkpoints"
        self.older, self.newer = (self.root / format_step_name(step) for step in (1, 2))
        for step, folder in ((1, self.older), (2, self.newer)):
            contestant.save(folder, step, make_state(step))
        self._kept = root / "kept"
        shutil.copytree(self.newer, self._kept)
        assert same(contestant.load(self.newer, make_state(2)), make_state(2))

    def files(self) -> list[Path]:
        """The files of the newer checkpoint, relative to it."""
        return [path.relative_to(self.newer) for path in damage.files(self.newer)]

    def repeat(
        self, kind: str, count: int, choose: Callable[[random.Random], Path]
    ) -> dict[str, int]:
        """Damage and load; count the outcomes, and for hlat what a resumed run would take."""
        expected, counts = make_state(2), Counter[str]()
        chance = random.Random(f"{kind} {count}")
        for _ in range(count):
            shutil.rmtree(self.newer)
            shutil.copytree(self._kept, self.newer)
            damage.KINDS[kind][0](choose(chance), self.older, chance)
            counts[outcome(self.contestant, self.newer, expected)] += 1
            if self.contestant.name == "hlat":
                counts["previous used"] += self._previous_is_used()
        shutil.rmtree(self.newer)
        shutil.copytree(self._kept, self.newer)
        return dict(counts)

    def _previous_is_used(self) -> bool:
        """Whether a resumed run takes the older checkpoint whole, and says why not the newer."""
        found, refused = find_newest_valid(self.root)
        told = len(refused) == 1 and f"{self.newer.name} is rejected: " in refused[0]
        return (
            told
            and found == self.older
            and same(self.contestant.load(found, make_state(1)), make_state(1))
        )


def measure(num_flips: int, num_others: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Outcomes by format and kind, and for hlat by file and kind."""
    rows, by_file = [], []
    for make in ALL:
        contestant = make()
        with tempfile.TemporaryDirectory() as root:
            bench = Bench(contestant, Path(root))
            for kind, count in damage.trials(num_flips, num_others):
                pick = damage.KINDS[kind][1]
                counts = bench.repeat(kind, count, partial(pick, bench.newer))
                rows.append({"format": contestant.name, "damage": kind, "trials": count} | counts)
                print(*rows[-1].values(), flush=True)
            if contestant.name != "hlat":
                continue
            for file in bench.files():
                for kind, count in damage.trials(num_flips, num_others):
                    counts = bench.repeat(kind, count, partial(_always, bench.newer / file))
                    by_file.append({"file": str(file), "damage": kind, "trials": count} | counts)
    return rows, by_file


def _always(file: Path, chance: random.Random) -> Path:
    return file


def render(result: dict[str, Any]) -> str:
    """The table of formats: noticed, and silently wrong, of all trials."""
    formats = list(dict.fromkeys(row["format"] for row in result["formats"]))
    lines = []
    for kind in damage.KINDS:
        cells = {row["format"]: _cell(row) for row in result["formats"] if row["damage"] == kind}
        lines.append([kind, *(cells[name] for name in formats)])
    return f"{table(['damage', *formats], lines)}\n\n{machine(result)}"


def render_files(result: dict[str, Any]) -> str:
    """The table of hlat's files: noticed, and the previous checkpoint used, of all trials."""
    names = list(dict.fromkeys(row["file"] for row in result["files"]))
    lines = []
    for kind in damage.KINDS:
        cells = {row["file"]: row for row in result["files"] if row["damage"] == kind}
        found = [
            f"{cells[name].get('noticed', 0)}, {cells[name]['previous used']} of "
            f"{cells[name]['trials']}"
            for name in names
        ]
        lines.append([kind, *found])
    return table(["damage", *names], lines)


def _cell(row: dict[str, Any]) -> str:
    wrong = row.get("silently wrong", 0)
    told = f"{row.get('noticed', 0)} of {row['trials']}"
    return f"{told}, **{wrong} silently wrong**" if wrong else told


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
