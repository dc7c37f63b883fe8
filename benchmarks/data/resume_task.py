"""Tasks of resume.py, which runs each in a separate process.

Usage: python benchmarks/data/resume_task.py '{"task": ..., "name": ..., ...}'   (JSON)
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from contestants import LENGTH, ROWS, Loader, Settings, load_module, make_settings
from count import NUM_NUMBERED, separators
from numpy.typing import NDArray

MAX_EPOCHS = 1.1
"""Number of epochs after which an infinite loader is stopped."""


def run(settings: Settings, folder: Path, documents: list[int], batches: int) -> dict[str, Any]:
    """Save the state and the following batches after each number of documents."""
    loader = load_module(settings).open_loader(settings)
    marks = separators(settings.scratch)
    seen = 0
    for count in sorted(documents):
        while seen < count:
            seen += int(np.isin(loader.next(), marks).sum())
        (folder / f"{settings.corpus}-{count}.state").write_bytes(loader.state())
        following = np.stack([loader.next() for _ in range(batches)])
        np.save(folder / f"{settings.corpus}-{count}.npy", following)
        seen += int(np.isin(following, marks).sum())
    return {}


def resume(settings: Settings, folder: Path, documents: int, batches: int) -> dict[str, Any]:
    """Restore a state and compare the following batches with the saved ones."""
    module = load_module(settings)
    state = (folder / f"{settings.corpus}-{documents}.state").read_bytes()
    start = time.perf_counter()
    loader = module.open_loader(settings)
    loader.restore(state)
    first = loader.next()
    seconds = time.perf_counter() - start
    resumed = np.stack([first, *(loader.next() for _ in range(batches - 1))])
    expected = np.load(folder / f"{settings.corpus}-{documents}.npy")
    exact = bool(np.array_equal(resumed, expected))
    return {"seconds": seconds, "state_bytes": len(state), "exact": exact}


def fresh(settings: Settings) -> dict[str, Any]:
    """Measure the time to open a loader and read the first batch."""
    module = load_module(settings)
    start = time.perf_counter()
    module.open_loader(settings).next()
    return {"seconds": time.perf_counter() - start}


def chain(settings: Settings, folder: Path, batches: int, first: bool) -> dict[str, Any]:
    """Continue after the previous process for at most `batches` batches, or to the end."""
    module = load_module(settings)
    loader = module.open_loader(settings)
    state, count = folder / "chain.state", folder / "chain.count"
    seen = 0
    if not first:
        loader.restore(state.read_bytes())
        seen = int(count.read_text())
    read, ended = read_batches(loader, batches, separators(settings.scratch), seen)
    np.save(folder / "chain.npy", np.array(read, np.int32).reshape(-1, ROWS, LENGTH))
    state.write_bytes(loader.state())
    count.write_text(str(seen + int(np.isin(read, separators(settings.scratch)).sum())))
    return {"ended": ended, "rows_are_streams": getattr(module, "ROWS_ARE_STREAMS", False)}


def read_batches(
    loader: Loader, batches: int, marks: list[int], seen: int
) -> tuple[list[NDArray[np.int32]], bool]:
    """Return the next batches, and True at the end of the corpus."""
    read: list[NDArray[np.int32]] = []
    try:
        while len(read) < batches and seen < MAX_EPOCHS * NUM_NUMBERED:
            read.append(loader.next())
            seen += int(np.isin(read[-1], marks).sum())
    except StopIteration:
        return read, True
    return read, seen >= MAX_EPOCHS * NUM_NUMBERED


def main() -> None:
    request = json.loads(sys.argv[1])
    task, name = request.pop("task"), request.pop("name")
    scratch, folder = Path(request.pop("scratch")), Path(request.pop("folder"))
    settings = make_settings(name, scratch, corpus=request.pop("corpus", "numbered"))
    if task == "fresh":
        result = fresh(settings)
    elif task == "chain":
        settings = make_settings(name, scratch, corpus="numbered", repeat=False)
        result = chain(settings, folder, **request)
    else:
        result = {"run": run, "resume": resume}[task](settings, folder, **request)
    print(json.dumps(result), flush=True)
    os._exit(0)  # some contestants do not end their threads


if __name__ == "__main__":
    main()
