"""The story of an evaluation: an engine is filled with a model, and the tasks are asked of it.

    tasks, data -> engine -> for each model: fill, ask task by task, keep what each came to

Tasks and data are looked at before the engine is built, since they are what is most often wrong.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hlat.checkpoint import places, store
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.config.errors import ConfigError, Exit
from hlat.config.run import Config
from hlat.engine import processes
from hlat.engine.create import create_engine
from hlat.engine.interface import Engine
from hlat.evaluation import follow, humaneval, leader, results, subject
from hlat.evaluation.leader import Leader
from hlat.evaluation.library import Library
from hlat.evaluation.results import Row, Task
from hlat.evaluation.subject import Subject
from hlat.evaluation.tasks import HUMANEVAL, Item
from hlat.evaluation.text_model import TextModel

SECONDS_BETWEEN_LOOKS = 30.0
"""Between looks for a new checkpoint."""


@dataclass(frozen=True)
class Order:
    """What is to be evaluated on what.

    Attributes:
        tasks: Names of sets, tasks or groups, and HumanEval's.
        shots: Examples before each question of the harness's own tasks; None: as many as they say.
        limit: Questions of each task; None: all.
        data: Folder of copies of data sets; None: the harness loads them.
        output: Where the scores are written; None: beside what is evaluated.
        followed: A run all of whose kept checkpoints are meant, also those to come; None: one model
            alone.
        code: How HumanEval's samples are drawn and judged.
    """

    tasks: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    data: Path | None = None
    output: Path | None = None
    followed: Path | None = None
    code: humaneval.Settings = field(default_factory=humaneval.Settings)

    @property
    def harness_tasks(self) -> list[str]:
        """The tasks that lm-evaluation-harness asks."""
        return [name for name in self.tasks if name != HUMANEVAL]


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
    problems = _problems(order) if HUMANEVAL in order.tasks else []
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
        asking = Leader(model, first.prompts, everyone)
        try:
            for one in _subjects(order, first, asked, asking, fill):
                answers = _ask(one, order, asked, asking)
                if problems:
                    answers = chain(answers, _code(one, order, len(problems), asking, write))
                if row := _kept(one, order, answers, _about(config, engine)):
                    tell(one, row)
        finally:
            asking.order("end")
    return Exit.FINISHED


def _load(order: Order) -> list[tuple[Item, Any]]:
    library = Library(order.data)
    return [(item, library.load(item)) for item in library.choose(order.harness_tasks, order.shots)]


def _problems(order: Order) -> list[humaneval.Problem]:
    """HumanEval's, from the folder of copies."""
    if order.followed is not None and not order.code.run_generated_code:
        raise ConfigError(
            "follow=true leaves out what has scores, and HumanEval gets none without "
            "run_generated_code=true (docs/humaneval.md); set it, or leave out tasks=humaneval"
        )
    folder = order.data or Path()
    files = [folder / name for name in ("HumanEval.jsonl", "HumanEval.jsonl.gz")]
    found = next((file for file in files if file.is_file()), files[-1])
    return humaneval.read(found)[: order.limit]


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
    names += ["pass@1"] if HUMANEVAL in order.tasks else []
    return all(name in known and known[name]["limit"] == order.limit for name in names)


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
    one: Subject, order: Order, answers: Iterable[tuple[dict[str, Task], Row]], about: Row
) -> Row:
    """Keep what each task came to at once; returns all of it."""
    path, found = order.output or results.path_of(one), dict[str, Task]()
    row: Row = {}
    since = time.perf_counter()
    try:
        for tasks, how in answers:
            found |= tasks
            seconds = time.perf_counter() - since
            row = results.keep(one, path, tasks, about | how | {"seconds": seconds})
            since += seconds
    finally:  # also of an evaluation that was interrupted
        if found:
            results.tell_run(one, row, found)
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
