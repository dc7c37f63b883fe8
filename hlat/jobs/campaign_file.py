"""Campaign files: stages of a campaign and their settings, validated without a configuration.

All problems of a file are reported at once. A key or the name of a stage that does not exist is
reported with the closest valid one.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.override_keys import find_repeated_keys
from hlat.config.package_dirs import find_package_dir
from hlat.config.untrusted_files import format_value, load_untrusted_yaml
from hlat.evaluate.user_tasks import is_task_file

KINDS = ("train", "average", "evaluate", "report")
"""Kinds of stages; the key of the kind has the overrides of a run, or the stages that it reads."""
ALL_STAGES = "all"
"""Value of `report` for a page of all stages."""
_COMMON_KEYS = ("after", "launcher", "hours")
_KEYS: dict[str, tuple[str, ...]] = {
    "train": ("start_from", "at_step", "at_tokens"),
    "average": ("last", "steps", "tokens"),
    "evaluate": (
        *("tasks", "steps", "tokens", "every_tokens", "limit", "shots", "data", "overrides"),
        *("samples", "run_generated_code"),
    ),
    "report": (),
}
"""Keys of each kind besides that of the kind and the common ones."""
_CHECKPOINT_KEYS = ("last", "steps", "tokens", "every_tokens", "at_step", "at_tokens")
"""Keys that select checkpoints of a training stage; at most one is given."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RESERVED_NAMES = {"campaign", "jobs", "replaced", "comparison", ALL_STAGES}
"""Names of other files and directories of a campaign."""


@dataclass(frozen=True)
class CampaignStage:
    """A stage as written in the file.

    Attributes:
        kind: One of `KINDS`.
        sources: Stages that an average, evaluation or report reads.
        overrides: Overrides of `hlat train` or `hlat evaluate`.
        start_from: Training stage with the checkpoint from which a run starts, by default the last.
        at_step: Step of this checkpoint.
        at_tokens: Token count of this checkpoint, rounded up to a step.
        after: Further stages that must finish first.
        launcher: Settings of `hydra.launcher` for this stage, by launcher.
        hours: Expected duration for the dry run, where the planner has none.
        last: Number of newest checkpoints to average.
        steps: Steps of the checkpoints.
        tokens: Token counts of the checkpoints, each rounded up to a step.
        every_tokens: Interval between evaluated checkpoints.
        tasks: Tasks of an evaluation, and `limit`, `shots`, `data`, `samples` and
            `run_generated_code` its settings.
    """

    name: str
    kind: str
    sources: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    start_from: str | None = None
    at_step: int | None = None
    at_tokens: int | None = None
    after: tuple[str, ...] = ()
    launcher: dict[str, Any] = field(default_factory=dict)
    hours: float | None = None
    last: int | None = None
    steps: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    every_tokens: int | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    shots: int | None = None
    data: str | None = None
    samples: int | None = None
    run_generated_code: bool = False

    @property
    def dependencies(self) -> tuple[str, ...]:
        """Names of all stages that must finish before this one."""
        names = [*self.sources, *([self.start_from] if self.start_from else []), *self.after]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Campaign:
    """A campaign: its stages in topological order, and settings of all of them.

    Attributes:
        root: Directory of all campaigns; the directory of this one is `<root>/<name>`.
        train: Overrides of all training stages.
        evaluate: Overrides of all evaluations.
        launcher: Settings of `hydra.launcher` of all stages, by launcher.
        source_dir: Directory of the file, to which relative paths of data sets may refer.
    """

    name: str
    stages: tuple[CampaignStage, ...]
    root: str = "runs"
    train: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()
    launcher: dict[str, Any] = field(default_factory=dict)

    source_dir: Path = Path()

    @property
    def directory(self) -> Path:
        """Directory of the campaign."""
        return Path(self.root) / self.name

    def find_data(self, stage: CampaignStage) -> Path | None:
        """Return the data sets of an evaluation: next to the file, or in the working directory."""
        if stage.data is None:
            return None
        path = Path(stage.data).expanduser()
        near = self.source_dir / path
        return near.absolute() if near.is_dir() else path.absolute()

    def get_stage(self, name: str) -> CampaignStage:
        """Return a stage by name."""
        return next(stage for stage in self.stages if stage.name == name)


def list_campaigns() -> list[str]:
    """Return the names of the campaigns of the package."""
    return sorted(file.stem for file in find_package_dir("campaigns").glob("*.yaml"))


def find_campaign_file(name: str) -> Path:
    """Return the file of a campaign of the package, or the path of a file of the user.

    Raises:
        ConfigError: There is no such file.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name in list_campaigns():
        return find_package_dir("campaigns") / f"{name}.yaml"
    raise ConfigError(
        f"{name} is not a campaign{_suggest(name, list_campaigns())}; give one of them, or the "
        "path of a YAML file"
    )


def load_campaign(file: Path) -> Campaign:
    """Return the campaign of a file.

    Raises:
        ConfigError: All problems of the file.
    """
    tree = load_untrusted_yaml(file)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} contains no keys; a campaign has stages:")
    known = [f.name for f in fields(Campaign) if f.name != "source_dir"]
    problems = [f"{key} is not a key of a campaign{_suggest(key, known)}" for key in tree]
    problems = [line for key, line in zip(tree, problems, strict=True) if key not in known]
    parser = _StageParser(tree.get("stages"))
    stages = parser.parse_stages()
    name = tree.get("name", file.stem)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(f"name: {format_value(name)} must consist of letters, digits, _ and -")
    train = parser.parse_overrides("train", tree.get("train", []))
    evaluate = parser.parse_overrides("evaluate", tree.get("evaluate", []))
    launcher = parser.parse_launcher("launcher", tree.get("launcher", {}))
    root = tree.get("root", "runs")
    if not isinstance(root, str) or not root:
        problems.append(f"root: {format_value(root)} is not the path of a directory")
    problems += parser.problems or find_graph_problems(stages)
    raise_config_errors(f"{file}: {problem}" for problem in problems)
    sorted_stages = sort_stages(stages)
    return Campaign(
        str(name), sorted_stages, str(root), train, evaluate, launcher, source_dir=file.parent
    )


def find_graph_problems(stages: Sequence[CampaignStage]) -> list[str]:
    """Return unknown stages, sources of the wrong kind, and cycles."""
    by_name = {stage.name: stage for stage in stages}
    problems = [
        f"stages.{stage.name}: {name} is not a stage{_suggest(name, by_name)}"
        for stage in stages
        for name in stage.dependencies
        if name not in by_name
    ]
    if problems:
        return problems
    for stage in stages:
        allowed = {"average": ("train",), "evaluate": ("train", "average")}.get(stage.kind, KINDS)
        for name in stage.sources:
            if by_name[name].kind not in allowed:
                problems.append(
                    f"stages.{stage.name}: {stage.kind}: {name} is a stage of kind "
                    f"{by_name[name].kind}; name one of kind {' or '.join(allowed)}"
                )
        if stage.start_from is not None and by_name[stage.start_from].kind != "train":
            problems.append(f"stages.{stage.name}.start_from: {stage.start_from} trains no model")
        has_steps = stage.steps or stage.tokens or stage.every_tokens
        if has_steps and any(by_name[name].kind == "average" for name in stage.sources):
            problems.append(f"stages.{stage.name}: an average has one checkpoint; remove the steps")
    try:
        sort_stages(stages)
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        problems.append(f"stages depend on each other: {cycle}; remove one of the dependencies")
    return problems


def sort_stages(stages: Sequence[CampaignStage]) -> tuple[CampaignStage, ...]:
    """Return the stages in an order in which each follows its dependencies.

    Raises:
        graphlib.CycleError: The stages depend on each other.
    """
    by_name = {stage.name: stage for stage in stages}
    positions = {name: position for position, name in enumerate(by_name)}
    graph = {stage.name: stage.dependencies for stage in stages}
    order = TopologicalSorter(graph)
    order.prepare()
    names: list[str] = []
    while order.is_active():
        ready = sorted(order.get_ready(), key=positions.__getitem__)
        names += ready
        order.done(*ready)
    return tuple(by_name[name] for name in names)


class _StageParser:
    """Parser of the stages, which collects the problems of all of them."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.problems: list[str] = []

    def parse_stages(self) -> list[CampaignStage]:
        """Return the valid stages in the order of the file."""
        if not isinstance(self._tree, dict) or not self._tree:
            self.problems.append("stages: give at least one stage by name")
            return []
        stages = []
        for name, content in self._tree.items():
            key = f"stages.{format_value(name)}"
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED_NAMES:
                self.problems.append(
                    f"{key}: choose another name, of letters, digits, _ and -, and not "
                    f"{', '.join(sorted(_RESERVED_NAMES))}"
                )
            elif not isinstance(content, dict):
                self.problems.append(f"{key} has no keys; give one of {', '.join(KINDS)}")
            else:
                stage = self._parse_stage(name, content)
                stages += [stage] if stage else []
        others = tuple(stage.name for stage in stages if stage.kind != "report")
        return [
            replace(stage, sources=others) if stage.sources == (ALL_STAGES,) else stage
            for stage in stages
        ]

    def _parse_stage(self, name: str, content: Mapping[str, Any]) -> CampaignStage | None:
        key, kinds = f"stages.{name}", [kind for kind in KINDS if kind in content]
        if len(kinds) != 1:
            unknown = [word for word in content if word not in _COMMON_KEYS]
            hints = [_suggest(str(word), KINDS) for word in unknown]
            given = " and ".join(kinds) or "none" + next(filter(None, hints), "")
            self.problems.append(f"{key}: give one of {', '.join(KINDS)}, not {given}")
            return None
        kind, num_problems = kinds[0], len(self.problems)
        known = (kind, *_KEYS[kind], *_COMMON_KEYS)
        for word in content:
            if word not in known:
                self.problems.append(
                    f"{key}.{word} is not a key of {kind} stages{_suggest(str(word), known)}"
                )
        values = {word: content[word] for word in content if word in known}
        parsed = self._parse_values(key, kind, values)
        self._find_conflicts(key, kind, parsed)
        return CampaignStage(name, kind, **parsed) if len(self.problems) == num_problems else None

    def _parse_values(self, key: str, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            path = f"{key}.{name}"
            if name == "train":
                parsed["overrides"] = self.parse_overrides(path, value)
            elif name == kind or name in ("after", "tasks", "overrides"):
                arguments = self.parse_overrides(path, [value] if isinstance(value, str) else value)
                parsed["sources" if name == kind else name] = arguments
            elif name == "launcher":
                parsed[name] = self.parse_launcher(path, value)
            elif name in ("steps", "tokens"):
                numbers = value if isinstance(value, list) else [value]
                parsed[name] = tuple(self._parse_int(path, number, 1) for number in numbers)
            elif name in ("limit", "shots", "samples") or name in _CHECKPOINT_KEYS:
                parsed[name] = self._parse_int(path, value, 0 if name == "shots" else 1)
            elif name == "run_generated_code":
                parsed[name] = self._parse_bool(path, value)
            elif name == "hours":
                parsed[name] = self._parse_hours(path, value)
            else:
                parsed[name] = self._parse_text(path, value)
        return parsed

    def _find_conflicts(self, key: str, kind: str, parsed: Mapping[str, Any]) -> None:
        selected = [name for name in _CHECKPOINT_KEYS if parsed.get(name) is not None]
        if len(selected) > 1:
            self.problems.append(f"{key}: give one of {' and '.join(selected)}")
        if kind == "train" and selected and "start_from" not in parsed:
            self.problems.append(
                f"{key}.{selected[0]} selects a checkpoint of the stage in {key}.start_from; give "
                "start_from"
            )
        if kind == "average":
            numbers = [parsed.get(name) for name in ("steps", "tokens")]
            count = parsed.get("last") or max(len(n or ()) for n in numbers)
            if count < 2:
                self.problems.append(f"{key}: give last, steps or tokens of two checkpoints")
        if kind in ("average", "evaluate") and len(parsed.get("sources", ())) != 1:
            self.problems.append(f"{key}.{kind}: name one stage")
        if kind == "evaluate" and not parsed.get("tasks"):
            self.problems.append(f"{key}: give tasks, such as tasks: [hlat_table2]")
        for name in filter(is_task_file, parsed.get("tasks") or ()):
            self.problems.append(
                f"{key}.tasks: {name} is a file, which may contain code; give it on the command "
                f"line: hlat evaluate RUN tasks={name}"
            )

    def parse_overrides(self, path: str, value: Any) -> tuple[str, ...]:
        """Return a list of strings as a tuple; a key that it sets twice is a problem."""
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            self.problems += [f"{path}: {problem}" for problem in find_repeated_keys(value)]
            return tuple(value)
        self.problems.append(f"{path}: {format_value(value)} is not a list of strings")
        return ()

    def parse_launcher(self, path: str, value: Any) -> dict[str, Any]:
        """Return the settings by launcher, such as {slurm: {partition: trn1}}."""
        if isinstance(value, dict) and all(isinstance(item, dict) for item in value.values()):
            return {str(key): item for key, item in value.items()}
        self.problems.append(
            f"{path}: {format_value(value)} is not of the form {{slurm: {{partition: trn1}}}}"
        )
        return {}

    def _parse_int(self, path: str, value: Any, minimum: int) -> int:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value >= minimum and value == int(value):
            return int(value)
        self.problems.append(f"{path}: {format_value(value)} is not a whole number of {minimum} up")
        return minimum

    def _parse_bool(self, path: str, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        self.problems.append(f"{path}: {format_value(value)} is not true or false")
        return False

    def _parse_hours(self, path: str, value: Any) -> float | None:
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.problems.append(f"{path}: {format_value(value)} is not a number above 0")
        return None

    def _parse_text(self, path: str, value: Any) -> str | None:
        if isinstance(value, str) and value:
            return value
        self.problems.append(f"{path}: {format_value(value)} is not text")
        return None


def _suggest(name: Any, known: Iterable[str]) -> str:
    names = [*known]
    if near := difflib.get_close_matches(str(name), names, 1):
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(names)}" if names else ""
