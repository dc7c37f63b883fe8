"""The story of an evaluation: an engine is filled with a model, and the tasks are asked of it.

    tasks, data -> engine -> for each model: fill, ask task by task, keep what it came to

Tasks and data are looked at before the engine is built, since they are what is most often wrong.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint import places, store
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.config.errors import Exit
from hlat.config.run import Config
from hlat.engine import processes
from hlat.engine.create import create_engine
from hlat.engine.interface import Engine
from hlat.evaluation import follow, leader, results, subject
from hlat.evaluation.leader import Leader
from hlat.evaluation.library import Library
from hlat.evaluation.results import Row, Task
from hlat.evaluation.subject import Subject
from hlat.evaluation.tasks import Item
from hlat.evaluation.text_model import TextModel

SECONDS_BETWEEN_LOOKS = 30.0
"""Between looks for a new checkpoint."""


@dataclass(frozen=True)
class Order:
    """What is to be evaluated on what.

    Attributes:
        tasks: Names of sets, tasks or groups.
        shots: Examples before each question of the harness's own tasks; None: as many as they say.
        limit: Questions of each task; None: all.
        data: Folder of copies of data sets; None: the harness loads them.
        output: Where the scores are written; None: beside what is evaluated.
        followed: A run all of whose kept checkpoints are meant, also those to come; None: one model
            alone.
    """

    tasks: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    data: Path | None = None
    output: Path | None = None
    followed: Path | None = None


def evaluate(
    config: Config, order: Order, first: Subject, tell: Callable[[Subject, Row], None]
) -> Exit:
    """Evaluate as one of the processes.

    Args:
        config: The engine.
        order: On what.
        first: The model, or the first of those that are followed.
        tell: Hears, on the first process, what each model came to.

    Raises:
        ConfigError: There is no such task, or its data is not there.
    """
    leads = processes.place().rank == 0
    asked = _load(order) if leads else []
    with closing(create_engine(config)) as engine:
        engine.build(config)
        first.fill(engine.chunks())
        model, everyone = TextModel(engine), engine.world.everyone

        def fill(location: str) -> Subject:
            place = places.at(location)
            found = subject.of_checkpoint(place, order.followed or place)
            found.fill(engine.chunks())
            return found

        if not leads:
            leader.follow(model, first.prompts, everyone, {"fill": fill})
            return Exit.FINISHED
        asking = Leader(model, first.prompts, everyone)
        try:
            for one in _subjects(order, first, asked, asking, fill):
                tell(one, _ask(one, order, asked, asking, _about(config, engine)))
        finally:
            asking.order("end")
    return Exit.FINISHED


def _load(order: Order) -> list[tuple[Item, Any]]:
    library = Library(order.data)
    return [(item, library.load(item)) for item in library.choose(order.tasks, order.shots)]


def _subjects(
    order: Order,
    first: Subject,
    asked: list[tuple[Item, Any]],
    asking: Leader,
    fill: Callable[[str], Subject],
) -> Iterator[Subject]:
    """The models that are meant, each when the engine is filled with it."""
    if order.followed is None:
        yield first
        return
    filled, damaged = first, set[str]()
    while True:
        over = follow.has_ended(order.followed)  # before the look, lest its last save be missed
        for place in follow.kept(order.followed):
            one = subject.of_checkpoint(place, order.followed)
            if str(place) in damaged or _is_scored(one, order, asked):
                continue
            if (problem := _damage(place)) is not None:
                print(f"WARNING: {problem}; it is left out", file=sys.stderr, flush=True)
                damaged.add(str(place))
                continue
            if one.location != filled.location:
                asking.order("fill", location=str(place))
                filled = fill(str(place))
            yield one
        if over:
            return
        asking.wait(SECONDS_BETWEEN_LOOKS)


def _damage(place: places.Place) -> str | None:
    """What is wrong with a checkpoint, read in full; None: it is what was written."""
    try:
        store.verify(place)
    except CorruptCheckpointError as error:
        return str(error)
    return None


def _is_scored(one: Subject, order: Order, asked: list[tuple[Item, Any]]) -> bool:
    """Whether each task was asked of a model already, of as many questions."""
    path = results.path_of(one)
    known = results.read(path)["tasks"] if path.is_file() else {}
    names = [name for item, loaded in asked for name in _names(item, loaded)]
    return all(name in known and known[name]["limit"] == order.limit for name in names)


def _names(item: Item, loaded: Any) -> list[str]:
    """Under which names a task's numbers are kept."""
    groups = loaded["groups"]
    return [item.task] if item.task in groups else [*loaded["tasks"]]


def _ask(
    one: Subject, order: Order, asked: list[tuple[Item, Any]], asking: Leader, about: Row
) -> Row:
    """Ask all tasks of the model that the engine holds; keep what each came to at once."""
    from hlat.evaluation.harness import Adapter, measure

    path, found = order.output or results.path_of(one), dict[str, Task]()
    row: Row = {}
    try:
        for item, loaded in asked:
            since, adapter = time.perf_counter(), Adapter(asking, one.positions)
            print(f"{one.name}: {item.task}", flush=True)
            answers = measure(adapter, loaded, order.limit)
            tasks = results.read_task(item, answers, order.limit)
            found |= tasks
            seconds = {"seconds": time.perf_counter() - since, "shortened": adapter.shortened}
            row = results.keep(one, path, tasks, about | seconds)
    finally:  # also of an evaluation that was interrupted
        if found:
            results.tell_run(one, row, found)
    return row


def _about(config: Config, engine: Engine) -> Row:
    layout = config.parallelism
    return {
        "harness": importlib.metadata.version("lm_eval"),
        "engine": config.engine.name.value,
        "device": engine.device,
        "tp": layout.tp,
        "pp": layout.pp,
        "precision": config.precision.name,
        "time": time.time(),
    }
