"""Short runs, their processes and checkpoints, for the fault trials.

A trial starts hlat as a user does, in a separate folder with a separate TMPDIR, so all leftover
files are from this trial. Checkpoints are verified with hlat's checkpoint store.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a fork would lose the threads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.common import describe_machine
from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.data import row_index
from hlat.storage.storage_path import TEMPORARY_PREFIX
from tests.faults.forked import Forked, import_all

REPOSITORY = Path(__file__).resolve().parents[2]
INJECTED = Path(__file__).resolve().parent / "injected"
Row = dict[str, Any]

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=176",
    "batch.global_batch_size=4",
    "batch.micro_batch_size=2",
    "batch.sequence_length=64",
    "data.sources.code.paths=[code.arrow]",
    "data.sources.prose.paths=[prose.arrow]",
    "data.sources.data.paths=[data.arrow]",
    "data.heldout_documents=8",
    "data.workers=0",
    "evaluation.sequences_per_source=1",
    "schedule.warmup_steps=5",
    "checkpoint.keep_last=2",
    "run.root=runs",
    "run.repeat=true",
)
"""Overrides of a run of one or two seconds on the test corpus, without steps and saves.

`run.repeat` allows a second run with the configuration of the finished uninterrupted run.
"""
LAYOUTS = {
    "single": (),
    "dp2": ("parallelism.dp=2",),
    "tp2": ("parallelism.tp=2",),
    "pp2": ("parallelism.pp=2",),
    "zero3": ("parallelism.dp=2", "parallelism.zero=3"),
}
TWO_RANKS = ("dp2", "tp2", "pp2", "zero3")
MEASURED = {
    *("tokens_per_second", "step_seconds", "data_wait_seconds", "mfu", "attempt", "time"),
    *("cost_usd", "cpt_usd", "memory_bytes"),
}
"""Values of a row that differ between two equal runs."""
CACHES = re.compile(r"torchinductor_.*|wandb.*|tmp.*wandb-(artifacts|media)")
NO_FIGURES = {"no_figures": True}
"""Rendering the figures of the report takes as long as the training."""
SUPERVISED = ("recovery.max_restarts=100000", "recovery.max_same_failures=100000")
Trial = Callable[["Workspace", str, random.Random], list[str]]
"""Injects a fault into runs of a layout. Returns for each fault its problem, or an empty string."""
KEEP_LAST = 2
"""checkpoint.keep_last of `SMALL`."""


def write_corpus(folder: Path) -> None:
    """Write the test corpus as three Arrow files with their row indexes."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (REPOSITORY / "tests/data/corpus.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for source in ("code", "prose", "data"):
        texts = [row["text"] for row in rows if row["source"] == source]
        written = pa.table({"text": texts, "source": [source] * len(texts)})
        path = folder / f"{source}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, written.schema) as writer:
            writer.write_table(written)
        row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")


class Workspace:
    """Folder for trials: the corpus, and a folder per run below runs/.

    Args:
        folder: New folder.
        forks: Fork the runs; see forked.py.
        reduced: Inject a fault once or twice per trial.
    """

    def __init__(self, folder: Path, forks: bool = False, reduced: bool = False) -> None:
        self.folder, self.forks, self.reduced = folder, forks, reduced
        self.tmp = folder / "tmp"
        self.tmp.mkdir(parents=True)
        self._shared = {*Path("/dev/shm").iterdir()}
        self._references: dict[tuple[str, ...], tuple[Run, float]] = {}
        self._numbers = itertools.count()
        write_corpus(folder / "corpus")

    def run(self, name: str, *overrides: str) -> "Run":
        """Return a run that has not been started."""
        return Run(self, name, overrides)

    def limit(self, count: int) -> int:
        """Return how often a trial injects its fault if a full one does it `count` times."""
        return min(count, 2) if self.reduced else count

    def new_run(self, *overrides: str) -> "Run":
        """Return a run with an unused name."""
        return self.run(f"run-{next(self._numbers)}", *overrides)

    def reference(self, *overrides: str) -> tuple["Run", float]:
        """Return the uninterrupted run with these overrides and its duration; train it once."""
        if overrides not in self._references:
            run = self.run(f"whole-{len(self._references)}", *overrides)
            start = time.monotonic()
            if code := run.finish():
                raise RuntimeError(f"the uninterrupted run ended with {code}: {run.output()}")
            self._references[overrides] = run, time.monotonic() - start
        return self._references[overrides]

    def clear_tmp(self) -> None:
        """Empty TMPDIR: no next supervisor may exist that removes the files of a killed one."""
        shutil.rmtree(self.tmp)
        self.tmp.mkdir()

    def leftovers(self) -> list[str]:
        """Return new files in /dev/shm and files in TMPDIR, except caches of torch and W&B.

        W&B removes its directories at exit, which a killed or forked process does not reach.
        Mapped shared memory belongs to other tests: the processes of the trial have ended.
        """
        made = {path for path in self.tmp.iterdir() if not CACHES.fullmatch(path.name)}
        new = {*Path("/dev/shm").iterdir()} - self._shared
        if new:
            time.sleep(1)  # others create semaphores, map them and remove their names
        mapped = _list_mapped_files() if new else ""
        unused = {path for path in new if str(path) not in mapped and path.exists()}
        return sorted(map(str, made | unused))


def _list_mapped_files() -> str:
    """Return the memory maps of all processes."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            maps.append(path.read_text())
    return "".join(maps)


class Run:
    """Run, its command, and the last process of the command."""

    def __init__(self, workspace: Workspace, name: str, overrides: tuple[str, ...]) -> None:
        self.workspace, self.name = workspace, name
        self.folder = workspace.folder / "runs" / name
        self.checkpoint_root = self.folder
        self.printed = workspace.folder / f"{name}.log"
        self.arguments = [*SMALL, f"data.root={workspace.folder / 'corpus'}", f"run.name={name}"]
        self.arguments += overrides
        self.variables = {"HLAT_FAULTS": json.dumps(NO_FIGURES)}
        self.forks = workspace.forks
        self.process: subprocess.Popen[bytes] | Forked

    def inject(self, **faults: Any) -> None:
        """Set the faults that injected/sitecustomize.py injects."""
        self.variables["HLAT_FAULTS"] = json.dumps(NO_FIGURES | faults)

    def start(self, *overrides: str) -> None:
        """Start the command and append its output to a file."""
        path = [str(REPOSITORY), str(INJECTED)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "TMPDIR": str(self.workspace.tmp),
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }
        arguments, cwd = [*self.arguments, *overrides], self.workspace.folder
        with self.printed.open("ab") as printed:
            if self.forks:
                out = printed.fileno()
                self.process = Forked(arguments, environment, cwd, out, out)
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hlat.train", *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )

    def finish(self, *overrides: str, timeout_s: float = 300) -> int:
        """Start the command, wait for it, and return its exit code."""
        self.start(*overrides)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 300) -> int:
        """Wait for the command and return its exit code; kill it after the timeout."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise

    def is_alive_after(self, seconds: float) -> bool:
        """Wait, at most until the command ends; return True if it is still running."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.005)
        return self.process.poll() is None

    def kill_all(self) -> None:
        """Kill the command and all processes that it started."""
        for number in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the training processes by rank."""
        return ranks(self.process.pid)

    def rows(self, file: str) -> list[Row]:
        """Return the complete lines of metrics.jsonl or events.jsonl."""
        path = self.folder / file
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def events(self, *names: str) -> list[Row]:
        """Return the events with these names."""
        return [row for row in self.rows("events.jsonl") if row["event"] in names]

    def last_step(self) -> int:
        """Return the step of the last row; 0 before the first."""
        return last_step(self.folder / "metrics.jsonl")

    def losses(self) -> list[tuple[int, float]]:
        """Return the step and loss of every row."""
        return [(row["step"], row["loss"]) for row in self.rows("metrics.jsonl")]

    def output(self) -> str:
        """Return the output of all commands of the run."""
        return self.printed.read_text() if self.printed.exists() else ""

    def stable_rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl without measured times and memory."""
        return [
            {key: value for key, value in row.items() if key not in MEASURED}
            for row in self.rows("metrics.jsonl")
        ]

    def tensor_hashes(self) -> Row:
        """Return the step of the newest checkpoint and the hashes of its files of tensors."""
        newest = max(self.checkpoints().glob("step_*/manifest.json"), default=None)
        if newest is None:
            return {}
        files = json.loads(newest.read_text())["files"]
        hashes = {name: file["sha256"] for name, file in files.items() if name != "state.json"}
        return {"step": newest.parent.name, **hashes}

    def checkpoints(self) -> Path:
        """Return the directory of the checkpoints."""
        return self.checkpoint_root / "checkpoints"

    def move_to(self, root: Path) -> None:
        """Set run.root of a run that has not been started."""
        self.arguments.append(f"run.root={root}")
        self.folder = self.checkpoint_root = root / self.name

    def remove(self) -> None:
        """Remove the folder and the log of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.printed.unlink(missing_ok=True)


def last_step(metrics: Path) -> int:
    """Return the step of the last complete row, or 0, and read only the end of the file."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().split(b"\n")[:-1]
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except ValueError:
        return 0


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and state of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = (int(fields[1]), fields[0])
    return found


def descendants(number: int) -> list[int]:
    """Return the children of a process, recursively."""
    there = processes()
    found, waiting = [], [number]
    while waiting:
        parent = waiting.pop()
        children = [one for one, (above, _) in there.items() if above == parent]
        found += children
        waiting += children
    return found


def ranks(command: int) -> dict[int, int]:
    """Return the training processes by rank: children of the command, or the command."""
    found = {}
    for number in descendants(command):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{number}/comm").read_text()
            if name.startswith("hlat rank"):
                found[int(name.split()[2])] = number
                continue
            variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
            arguments = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
            rank_values = [word[5:] for word in variables if word.startswith(b"RANK=")]
            if rank_values and b"hlat.train" in arguments:
                found[int(rank_values[0])] = number
    return found


def find_survivors(pids: list[int], within_s: float = 10) -> list[int]:
    """Return the processes that still exist after `within_s`, except zombies."""
    deadline = time.monotonic() + within_s
    while True:
        there = processes()
        left = [number for number in pids if number in there and there[number][1] != "Z"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


class CheckpointChecker:
    """Verifies that committed checkpoints are intact until enough newer ones exist.

    Args:
        folder: The run's checkpoints.
        keep_last: Number of newer checkpoints that replace an older one.

    Attributes:
        problems: Lost and damaged checkpoints.
        verified: Number of checkpoints read in full.
    """

    def __init__(self, folder: Path, keep_last: int = KEEP_LAST) -> None:
        self.folder, self._keep_last = folder, keep_last
        self.problems: list[str] = []
        self.verified = 0
        self._left: set[str] = set()

    def committed(self) -> list[int]:
        """Return the steps of the folders named like a checkpoint, newest first."""
        with contextlib.suppress(FileNotFoundError):
            found = [checkpoint_store.parse_step(path) for path in self.folder.iterdir()]
            return sorted((step for step in found if step is not None), reverse=True)
        return []

    def was_writing(self) -> bool:
        """Return True if a checkpoint is being written or removed, or was at the last kill.

        Folders that an earlier call found are of earlier kills.
        """
        unfinished = self.unfinished()
        new, self._left = unfinished - self._left, unfinished
        return bool(new)

    def unfinished(self) -> set[str]:
        """Return the names of temporary folders: of writes, removals and killed writers."""
        with contextlib.suppress(FileNotFoundError):
            names = {path.name for path in self.folder.iterdir()}
            return {name for name in names if name.startswith(TEMPORARY_PREFIX)}
        return set()

    def check(self, before: list[int]) -> None:
        """Verify all checkpoints, and find those of `before` that are missing.

        An active run may prune a checkpoint if enough newer ones exist.
        """
        valid = set()
        for step in self.committed():
            path = self.folder / checkpoint_store.format_step_name(step)
            try:
                checkpoint_store.verify_checkpoint(path)
                valid.add(step)
            except CorruptCheckpointError as error:
                if path.exists():
                    self.problems.append(f"damaged: {error}")
            self.verified += 1
        for step in before[: self._keep_last]:
            newer = [one for one in {*valid, *self.committed()} if one > step]
            if step not in valid and len(newer) < self._keep_last:
                self.problems.append(f"lost: {self.folder} step {step} of {before}, has {valid}")


def find_loss_difference(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> str:
    """Return how the losses differ from those of the uninterrupted run; empty if they are equal."""
    steps = [step for step, _ in found]
    if steps != [step for step, _ in expected]:
        return f"steps are {steps}"
    unequal = [
        step for (step, one), (_, other) in zip(found, expected, strict=True) if one != other
    ]
    return f"losses differ at steps {unequal}" if unequal else ""


def compare(run: Run, reference: Run) -> list[str]:
    """Return the bitwise differences of rows and tensors from the uninterrupted run."""
    rows, expected = run.stable_rows(), reference.stable_rows()
    steps, expected_steps = ([row["step"] for row in some] for some in (rows, expected))
    if steps != expected_steps:
        return [f"{run.name}: metrics.jsonl has the steps {steps}"]
    differ = [row["step"] for row, other in zip(rows, expected, strict=True) if row != other]
    problems = [f"{run.name}: rows differ at the steps {differ}"] if differ else []
    if run.tensor_hashes() != reference.tensor_hashes():
        problems.append(f"{run.name}: tensors of the last checkpoint differ")
    return problems


def finish_and_compare(run: Run, reference: Run, expected_code: int = 0) -> list[str]:
    """Wait for a run, compare it with the uninterrupted one, and return the problems."""
    code = run.wait()
    if code != expected_code:
        return [f"{run.name}: exit code {code}: {run.output()[-500:]}"]
    left = [f"{run.name}: left {name}" for name in run.workspace.leftovers()]
    return compare(run, reference) + left


def print_progress(text: str) -> None:
    """Print progress to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def build_parser(description: str, trials: int) -> argparse.ArgumentParser:
    """Return the parser with the options of all trial scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--trials", type=int, default=trials, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices")
    parser.add_argument("--output", type=Path, help="file for the result; default: print only")
    parser.add_argument("--forks", action="store_true", help="start runs by forking; see forked.py")
    parser.add_argument("--folder", type=Path, help="keep the runs there; default: remove them")
    return parser


@contextlib.contextmanager
def open_workspace(
    folder: Path | None, forks: bool = False, reduced: bool = False
) -> Iterator[Workspace]:
    """Yield a workspace; remove it afterwards unless a folder is given."""
    if forks:
        import_all()
    if folder is not None:
        yield Workspace(folder.resolve(), forks, reduced)
        return
    with tempfile.TemporaryDirectory(prefix="trials-", ignore_cleanup_errors=True) as made:
        yield Workspace(Path(made), forks, reduced)


def build_run_overrides(steps: int, every_steps: int) -> tuple[str, ...]:
    """Return overrides for the steps of a run and between its checkpoints."""
    return (f"schedule.total_steps={steps}", f"checkpoint.every_steps={every_steps}")


def run_script(main: Callable[[], None]) -> None:
    """Run the main function of a script; exit with 130 after Ctrl-C."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)


def write_result(result: Row, output: Path | None) -> None:
    """Print a result, and write it to `output` if given."""
    text = json.dumps({**result, "machine": describe_machine(["torch"])}, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n")
