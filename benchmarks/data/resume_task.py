"""The tasks of resume.py, each in a process of its own.

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

ROOM = 1.1
"""A loader without end is stopped when it gave so many times the documents of an epoch."""


def run(settings: Settings, folder: Path, documents: list[int], batches: int) -> dict[str, Any]:
    """Leave the state and the batches after it at several counts of documents."""
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
    """Open, restore, take batches; compare."""
    module = load_module(settings)
    state = (folder / f"{settings.corpus}-{documents}.state").read_bytes()
    start = time.perf_counter()
    loader = module.open_loader(settings)
    loader.restore(state)
    first = loader.next()
    seconds = time.perf_counter() - start
    got = np.stack([first, *(loader.next() for _ in range(batches - 1))])
    wanted = np.load(folder / f"{settings.corpus}-{documents}.npy")
    exact = bool(np.array_equal(got, wanted))
    return {"seconds": seconds, "state_bytes": len(state), "exact": exact}


def fresh(settings: Settings) -> dict[str, Any]:
    """Open and take the first batch."""
    module = load_module(settings)
    start = time.perf_counter()
    module.open_loader(settings).next()
    return {"seconds": time.perf_counter() - start}


def chain(settings: Settings, folder: Path, batches: int, first: bool) -> dict[str, Any]:
    """Go on where the last process stopped, for so many batches or until every document came."""
    module = load_module(settings)
    loader = module.open_loader(settings)
    state, count = folder / "chain.state", folder / "chain.count"
    seen = 0
    if not first:
        loader.restore(state.read_bytes())
        seen = int(count.read_text())
    taken, ended = take(loader, batches, separators(settings.scratch), seen)
    np.save(folder / "chain.npy", np.array(taken, np.int32).reshape(-1, ROWS, LENGTH))
    state.write_bytes(loader.state())
    count.write_text(str(seen + int(np.isin(taken, separators(settings.scratch)).sum())))
    return {"ended": ended, "rows_are_streams": getattr(module, "ROWS_ARE_STREAMS", False)}


def take(
    loader: Loader, batches: int, marks: list[int], seen: int
) -> tuple[list[NDArray[np.int32]], bool]:
    """Batches, and whether the corpus has come to its end."""
    taken: list[NDArray[np.int32]] = []
    try:
        while len(taken) < batches and seen < ROOM * NUM_NUMBERED:
            taken.append(loader.next())
            seen += int(np.isin(taken[-1], marks).sum())
    except StopIteration:
        return taken, True
    return taken, seen >= ROOM * NUM_NUMBERED


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
