"""The story of an evaluation: an engine is filled with a model, and the tasks are asked of it.

    tasks, data -> engine -> for each model: fill, ask task by task, keep what each came to

Tasks and data are looked at before the engine is built, since they are what is most often wrong.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hlat.checkpoint import places, store
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.config.errors import Exit
from hlat.config.run import Config
from hlat.engine import processes
from hlat.engine.create import create_engine
from hlat.engine.interface import Engine
from hlat.evaluation import follow, humaneval, leader, results, subject
from hlat.evaluation.leader import Leader
from hlat.evaluation.library import Library
from hlat.evaluation.order import Order
from hlat.evaluation.order import problems as problems_of
from hlat.evaluation.results import Row, Task
from hlat.evaluation.subject import Subject
from hlat.evaluation.tasks import HUMANEVAL, Item
from hlat.evaluation.text_model import TextModel

_CODE = ("pass@1", "pass@10")
"""Under which names HumanEval's numbers are kept."""


@dataclass(frozen=True)
class Left:
    """What is still to be asked of a model.

    Attributes:
        asked: The harness's tasks.
        code: Whether HumanEval's functions are to be written.
        done: What other tasks of the order came to before.
    """

    asked: list[tuple[Item, Any]]
    code: bool
    done: dict[str, Task]

    def __bool__(self) -> bool:
        return bool(self.asked) or self.code


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
    problems = problems_of(order) if HUMANEVAL in order.tasks else []
    asked = _load(order) if leads and order.harness_tasks else []
    with closing(create_engine(config)) as engine:
        engine.build(config, trains=False)
        first.fill(engine.chunks())
        model, everyone = TextModel(engine), engine.world.everyone

        def fill(location: str) -> Subject:
            place = places.at(location)
            found = subject.of_checkpoint(place, order.followed or place)
            found.fill(engine.chunks())
            return found

        def write(folder: str, name: str) -> dict[str, float]:
            return humaneval.run(model, first.prompts, problems, Path(folder), name, order.code)

        if not leads:
            leader.follow(model, first.prompts, everyone, {"fill": fill, "write": write})
            return Exit.FINISHED
        with Leader(model, first.prompts, everyone) as asking:
            for one, left in _subjects(order, first, asked, asking, fill):
                answers = _ask(one, order, left.asked, asking)
                if left.code:
                    answers = chain(answers, _code(one, order, len(problems), asking, write))
                if row := _kept(one, order, answers, _about(config, engine), left.done):
                    tell(one, row)
    return Exit.FINISHED


def _load(order: Order) -> list[tuple[Item, Any]]:
    library = Library(order.data)
    return [(item, library.load(item)) for item in library.choose(order.harness_tasks, order.shots)]


def _subjects(
    order: Order,
    first: Subject,
    asked: list[tuple[Item, Any]],
    asking: Leader,
    fill: Callable[[str], Subject],
) -> Iterator[tuple[Subject, Left]]:
    """The models that are meant, each when the engine is filled with it."""
    if order.followed is None:
        left = _left(first, order, asked)
        if not left:
            print(f"{first.name} has scores on all of these tasks already", flush=True)
        yield first, left
        return
    filled, damaged = first, set[str]()
    while True:
        over = follow.has_ended(order.followed)  # before the look, lest its last save be missed
        for place in follow.kept(order.followed):
            one = subject.of_checkpoint(place, order.followed)
            if str(place) in damaged or not (left := _left(one, order, asked)):
                continue
            if (problem := _damage(place)) is not None:
                print(f"WARNING: {problem}; it is left out", file=sys.stderr, flush=True)
                damaged.add(str(place))
                continue
            if one.location != filled.location:
                asking.order("fill", location=str(place))
                filled = fill(str(place))
            yield one, left
        if over:
            return
        asking.wait(follow.SECONDS_BETWEEN_LOOKS)


def _damage(place: places.Place) -> str | None:
    """What is wrong with a checkpoint, read in full; None: it is what was written."""
    try:
        store.verify(place)
    except CorruptCheckpointError as error:
        return str(error)
    return None


def _left(one: Subject, order: Order, asked: list[tuple[Item, Any]]) -> Left:
    """What was not yet asked of a model, or not of as many questions; all if it is asked anew."""
    code = HUMANEVAL in order.tasks
    if not order.resumes:
        return Left(asked, code, {})
    known = results.known(order.output or results.path_of(one), order.limit)
    names = {item.task: _names(item, loaded) for item, loaded in asked}
    left = [(item, loaded) for item, loaded in asked if not {*names[item.task]} <= {*known}]
    mine = {*chain(*names.values()), *([*_CODE] if code else [])}
    done = {name: task for name, task in known.items() if name in mine}
    return Left(left, code and "pass@1" not in known, done)


def _names(item: Item, loaded: Any) -> list[str]:
    """Under which names a task's numbers are kept."""
    groups = loaded["groups"]
    return [item.task] if item.task in groups else [*loaded["tasks"]]


def _ask(
    one: Subject, order: Order, asked: list[tuple[Item, Any]], asking: Leader
) -> Iterator[tuple[dict[str, Task], Row]]:
    """Ask the harness's tasks of the model that the engine holds; what each came to, and how."""
    if not asked:
        return
    from hlat.evaluation.harness import Adapter, measure

    version = importlib.metadata.version("lm_eval")
    for item, loaded in asked:
        adapter = Adapter(asking, one.positions)
        print(f"{one.name}: {item.task}", flush=True)
        answers = measure(adapter, loaded, order.limit)
        how = {"harness": version, "shortened": adapter.shortened}
        yield results.read_task(item, answers, order.limit), how


def _code(
    one: Subject,
    order: Order,
    num_problems: int,
    asking: Leader,
    write: Callable[[str, str], dict[str, float]],
) -> Iterator[tuple[dict[str, Task], Row]]:
    """Let the model write HumanEval's functions; nothing comes of it if they are not judged."""
    print(f"{one.name}: {HUMANEVAL}", flush=True)
    first = f"_first_{order.limit}" if order.limit else ""
    folder = results.path_of(one).parent / f"{one.name}_{HUMANEVAL}{first}"
    asking.order("write", folder=str(folder), name=one.name)
    shares = write(str(folder), one.name)
    found = {}
    for name, share in shares.items():
        metric = f"{name},unbiased"
        found[name] = Task(0, {metric: share}, {}, metric, num_problems, order.limit)
    if found:
        yield found, {"samples": order.code.num_samples, "shortened": 0}


def _kept(
    one: Subject,
    order: Order,
    answers: Iterable[tuple[dict[str, Task], Row]],
    about: Row,
    done: dict[str, Task],
) -> Row:
    """Keep what each task came to at once; returns all of it.

    The run is told of what was done before as well, since whoever did it may have been killed.
    """
    path, found = order.output or results.path_of(one), dict[str, Task]()
    row: Row = {}
    since = time.perf_counter()
    try:
        for tasks, how in answers:
            found |= tasks
            seconds = time.perf_counter() - since
            row = results.keep(one, path, tasks, about | how | {"seconds": seconds})
            since += seconds
    finally:  # also of an evaluation that was interrupted, even on its way back from keeping
        if found and path.is_file():
            results.tell_run(one, results.read(path), done | found)
    return row


def _about(config: Config, engine: Engine) -> Row:
    layout = config.parallelism
    return {
        "engine": config.engine.name.value,
        "device": engine.device,
        "tp": layout.tp,
        "pp": layout.pp,
        "precision": config.precision.name,
        "time": time.time(),
    }
