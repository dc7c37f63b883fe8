"""Inject the faults of HLAT_FAULTS, a JSON object of any of these keys, into a run of hlat.

    no_figures        figures of the report are empty
    step_s            additional seconds of each step, idle, as if a device worked
    first_step_s      the same for the first step of an attempt
    save_s            the same for each save, in the process that writes it
    evaluation_s      the same for each evaluation during training
    nan               a file with a step per line, at which the gradients of `rank` are NaN
    rank              of `nan`; default 0
    spike             [first, last]: steps that are reported with a gradient norm 1000 higher
    garbage           [first, last]: steps with batches of noise, also when they are repeated
    once              `spike` counts steps as this process trains them, so a repeated one is good
    raise             [rank, step, file]: a rank raises there unless the file exists, and makes it;
                      no file: at each such step
    hang              [rank, step, way, file]: a rank hangs there in one of `WAYS` unless the file
                      exists, and makes it
    clock             [step, seconds]: from this step on, or the first of an attempt, time.time() is shifted
    uncapable         root has no more access to files than their modes allow
    store             a file; while it exists, requests to failing:// raise an exception
    flip              [rank, step, file]: a bit of a weight flips on a rank unless the file exists
    disk              [errno, seconds]: of every other save one call fails, the n-th of the n-th
                      such save, or sleeps if errno is 0; the other calls work

Python imports this module first. hlat's modules are patched when they are loaded.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

FAULTS = {}
RANK = 0


class Step:
    """Current step, and number of steps that this process has trained."""

    number = 0
    trained = 0


def patch_tracker(module):
    tracker = module.Tracker
    log_ready, rewind = tracker.log_ready, tracker.rewind

    def set_ready(self, step):
        Step.number = step
        return log_ready(self, step)

    def set_rewind(self, step):
        Step.number = step
        return rewind(self, step)

    tracker.log_ready, tracker.rewind = set_ready, set_rewind


def nan_steps():
    try:
        with open(FAULTS["nan"]) as file:
            return {int(line) for line in file.read().split()}
    except (KeyError, OSError):
        return set()


class NotFinite:
    """Forward and backward passes with a loss scale that is NaN."""

    def __init__(self, runner):
        self.runner = runner

    def backward(self, batch, micro_batch_size, scale):
        return self.runner.backward(batch, micro_batch_size, scale * float("nan"))


def raise_once():
    rank, step, *files = FAULTS.get("raise", (None, None))
    if (rank, step) != (RANK, Step.number) or any(map(os.path.exists, files)):
        return
    for file in files:
        open(file, "x").close()
    raise RuntimeError("injected")


def wait_for_peers():
    import torch.distributed

    torch.distributed.barrier()


def hold_the_gil():
    ctypes.PyDLL(None).sleep(3600)


def stop_data_worker():
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for number in children:
        os.kill(int(number), signal.SIGSTOP)


WAYS = {
    "waits for peers that do not come": wait_for_peers,
    "holds the GIL": hold_the_gil,
    "data worker stopped": stop_data_worker,
}


def hang_once():
    rank, step, way, file = FAULTS.get("hang", (None, None, None, ""))
    if (rank, step) == (RANK, Step.number) and not os.path.exists(file):
        open(file, "x").close()
        WAYS[way]()


def jump_clock():
    step, seconds = FAULTS.get("clock", (0, 0))
    if Step.number >= step > 0:
        FAULTS.pop("clock")
        now = time.time
        time.time = lambda: now() + seconds


def flip_once(engine):
    rank, step, file = FAULTS.get("flip", (None, None, ""))
    if (rank, step) == (RANK, Step.number) and not os.path.exists(file):
        import torch

        open(file, "x").close()
        weight = next(iter(engine.params.optimizer_params.values()))
        weight.detach().view(torch.int32).view(-1)[7] ^= 1 << 20


def drop_capabilities():
    """Give up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH; see capget(2)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (libc.capget, libc.capset):
        if call(header, data):
            raise OSError(ctypes.get_errno(), "capabilities")
        for index in range(3):
            data[index] &= ~0b110


def register_store():
    """Register the protocol failing://, the local disk with requests that may fail."""
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.registry import register_implementation

    class FailingStore(LocalFileSystem):
        protocol = "failing"

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("failing://"))

    def failing(name):
        method = getattr(LocalFileSystem, name)

        def request(self, *arguments, **options):
            if os.path.exists(FAULTS["store"]):
                raise RuntimeError(f"503 Slow Down at {name}")
            return method(self, *arguments, **options)

        return request

    for name in ("ls", "info", "_open", "cat_file", "cp_file", "rm_file", "rm", "makedirs"):
        setattr(FailingStore, name, failing(name))
    register_implementation("failing", FailingStore, clobber=True)


def patch_engine(module):
    import numpy as np

    engine = module.NativeEngine
    train_step, read = engine.train_step, engine.read_metrics
    bad = set()

    def spoil(sequences):
        """Replace the tokens of bad batches by noise, the same on all ranks."""
        first, last = FAULTS["garbage"]
        key = sequences.tokens.tobytes()
        if first <= Step.trained <= last:
            bad.add(key)
        if key in bad:
            noise = np.random.default_rng(Step.number)
            sequences.tokens[...] = noise.integers(0, 4096, sequences.tokens.shape, dtype=np.int32)

    def step(self, sequences, *arguments):
        Step.number += 1
        Step.trained += 1
        time.sleep(FAULTS.get("step_s", 0))
        if Step.trained == 1:
            time.sleep(FAULTS.get("first_step_s", 0))
        raise_once()
        hang_once()
        jump_clock()
        if "garbage" in FAULTS:
            spoil(sequences)
        runner = self._runner
        if FAULTS.get("rank", 0) == RANK and Step.number in nan_steps():
            self._runner = NotFinite(runner)
        try:
            pending = train_step(self, sequences, *arguments)
            flip_once(self)
            return pending
        finally:
            self._runner = runner

    def read_metrics(self, pending):
        metrics = read(self, pending)
        if "grad_norm" in pending and "spike" in FAULTS:
            first, last = FAULTS["spike"]
            if first <= (Step.trained if FAULTS.get("once") else Step.number) <= last:
                return replace(metrics, grad_norm=metrics.grad_norm + 1000)
        return metrics

    engine.train_step, engine.read_metrics = step, read_metrics


def patch_store(module):
    save = module.save_checkpoint

    def slow(*arguments, **keywords):
        time.sleep(FAULTS.get("save_s", 0))
        Disk.begin()
        return save(*arguments, **keywords)

    module.save_checkpoint = slow


class Disk:
    """Counter of the disk calls of a save, one of which raises an error.

    `calls` are those of the current save, `most` the maximum of all saves.
    """

    saves = calls = most = 0

    @classmethod
    def begin(cls):
        cls.saves += 1
        cls.calls = 0

    @classmethod
    def touch(cls):
        cls.calls += 1
        cls.most = max(cls.most, cls.calls)
        number, seconds = FAULTS["disk"]
        if cls.saves % 2 == 0 and cls.calls == cls.saves // 2:
            time.sleep(seconds)
            if number:
                raise OSError(number, os.strerror(number))


def touching(call):
    def touched(*arguments, **keywords):
        Disk.touch()
        return call(*arguments, **keywords)

    return touched


class File:
    """File with counted writes."""

    def __init__(self, *arguments):
        Disk.touch()
        self.file = open(*arguments)
        self.tell, self.fileno, self.read = self.file.tell, self.file.fileno, self.file.read
        self.write, self.flush = touching(self.file.write), touching(self.file.flush)

    def writelines(self, blocks):
        for block in blocks:
            self.write(block)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()


class System:
    """Module os with counted calls of fsync and replace."""

    def __init__(self):
        self.fsync, self.replace = touching(os.fsync), touching(os.replace)

    def __getattr__(self, name):
        return getattr(os, name)


def patch_durable(module):
    if "disk" in FAULTS:
        module.os = System()
        module.open = lambda *arguments: (
            open(*arguments) if arguments[1] == "rb" else File(*arguments)
        )


def patch_evaluation(module):
    evaluate = module.evaluate_heldout

    def slow(engine, data, tracker, step, *arguments):
        if step:
            time.sleep(FAULTS.get("evaluation_s", 0))
        return evaluate(engine, data, tracker, step, *arguments)

    module.evaluate_heldout = slow


def patch_figures(module):
    if "no_figures" in FAULTS:
        module.ReportFigure.render_svg = lambda self: "<svg></svg>"
        module.ReportFigure.render_png = lambda self: b""


PATCHES = {
    "hlat.figures.report_figure": patch_figures,
    "hlat.tracking.tracker": patch_tracker,
    "hlat.engine.native.native_engine": patch_engine,
    "hlat.storage.durable_files": patch_durable,
    "hlat.evaluate.heldout_evaluation": patch_evaluation,
    "hlat.checkpoint.checkpoint_store": patch_store,
}


class Finder(importlib.abc.MetaPathFinder):
    """Patches modules when they have been loaded."""

    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            PATCHES[name](module)

        loader.exec_module = exec_module
        return spec


def read_environment():
    global RANK
    FAULTS.update(json.loads(os.environ.get("HLAT_FAULTS", "{}")))
    RANK = int(os.environ.get("RANK", 0))
    if "uncapable" in FAULTS:
        drop_capabilities()
    if "store" in FAULTS:
        register_store()


def patch(modules):
    """Patch modules that are loaded already, if there are faults."""
    patched = bool(FAULTS)  # the process that forked this one
    read_environment()
    if FAULTS and not patched:
        for name, change in PATCHES.items():
            change(modules[name] if name in modules else importlib.import_module(name))


if __name__ == "sitecustomize":
    read_environment()
    sys.meta_path.insert(0, Finder())
