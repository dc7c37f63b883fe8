"""What to expect before a node is booked: `python -m hlat.plan OVERRIDE ...`, as of hlat.train.

Three first words plan something else, each with a function of its own in `_COMMANDS`: `failures`,
`cost`, and `from_nxdt=FILE.yaml`.
"""

import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.arguments import Parser, leave, number
from hlat.config.errors import ConfigError, Exit

if TYPE_CHECKING:
    from hlat.config.run import Config
    from hlat.planning.failures import Scenario
    from hlat.planning.forecast import Forecast
    from hlat.planning.search import Layout

_HELP = """\
usage: python -m hlat.plan OVERRIDE ... [--json] [--figure FILE]
       python -m hlat.plan COMMAND ...

What to expect, before a node is booked: memory, time and cost of what hlat.train would run.

overrides as of hlat.train, and
  search=true  every valid layout of the model on these nodes, the fastest that fits first

options:
  --json         print all numbers as JSON
  --figure FILE  draw memory and time of a step (svg or png)

commands:
  failures   uptime, goodput and the best checkpoint interval, by formula and by simulation
  cost       cost per 4 million tokens over numbers of nodes: the HLAT paper's figure 5
  from_nxdt  the same run as a configuration of NeuronX Distributed Training, in overrides of hlat

The exit code is 2 where the run does not fit, or breaks a rule.

examples:
  python -m hlat.plan model=70b precision=mixed hardware=trn1_32xl hardware.nodes=4
  python -m hlat.plan model=70b precision=mixed hardware=trn1_32xl hardware.nodes=256 search=true
  python -m hlat.plan failures nodes=256
  python -m hlat.plan from_nxdt=hf_llama3_8B_config.yaml

`python -m hlat.plan COMMAND --help` tells more; docs/planning.md has the formulas."""

_FAILURES = """\
keys (times in seconds, those of the scenario unless given):
  scenario        automatic: HLAT-7B with automatic recovery; manual: the paper's run without
  nodes           that must all work
  mtbf_h          hours between failures of one node, on average
  detect_s        until a failure is noticed
  response_s      until the restart begins, on average (log-normal)
  restart_s       until processes have started; failures meanwhile count
  load_s          until they have read the checkpoint; failures meanwhile count
  save_stall_s    for which a save stops training
  save_write_s    from there until the checkpoint would survive a failure
  step_s          a step of training
  every_steps     steps between saves
  steps           of the run, rounded up to whole intervals
  trials, seed    of the simulation (1000, 0)

examples:
  python -m hlat.plan failures
  python -m hlat.plan failures scenario=manual every_steps=300
  python -m hlat.plan failures nodes=256 save_stall_s=2 save_write_s=60 --figure goodput.svg

docs/failures.md tells the formulas and where the numbers come from."""

_COST = """\
Shares of what the paper calls 100%, 7B on four p4d nodes, at the paper's prices. That baseline is
planned too, with constants that are fitted to the figure: docs/planning.md.

example:
  python -m hlat.plan cost --figure figures/cost.png"""

_FROM_NXDT = """\
Prints the command that trains the same, what only you can set, and every other key of the file with
the reason why it has no equivalent or needs none. The sizes of an hf model are read from the
config.json that the file names, where it is or beside the file. Nothing in either file is resolved
or run. The exit code is 2 where hlat.train would refuse the command.

example:
  python -m hlat.plan from_nxdt=hf_llama3_8B_config.yaml

docs/nxdt.md lists the keys."""

_INTERRUPTED = 130
_ENDINGS = (".png", ".svg")
_NEAREST = 3
_MAY_BE_ZERO = {
    *("detect_s", "response_s", "restart_s", "load_s", "save_stall_s", "save_write_s", "seed")
}

_DEFAULTS = {"scenario": "automatic", "trials": 1000, "seed": 0}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return the exit code."""
    first, *words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command, equals, value = first.partition("=")
    try:
        if command in _COMMANDS:
            return _COMMANDS[command]([value, *words] if equals else words)
        if {"-h", "--help"} & {first, *words}:
            print(_HELP)
            return Exit.FINISHED
        near = difflib.get_close_matches(command, _COMMANDS, 1)
        if not first.startswith("-") and (near or not equals):
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
            raise ConfigError(f"{command} cannot be planned; {hint}")
        return _run([first, *words])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(words: Sequence[str]) -> int:
    """Plan a run, or search its layouts."""
    parser = Parser("python -m hlat.plan", "Memory, time and cost of a run.", "")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    arguments = parser.parse_intermixed_args(words)
    searched, overrides = _search(arguments.overrides)
    if searched and arguments.figure is not None:
        raise ConfigError(f"--figure {arguments.figure} shows one layout; leave out search=true")
    _check_ending(arguments.figure)
    config, problems = _read(overrides)
    if searched:
        return _ranked(config, arguments.json)
    if problems:
        return _impossible(config, problems, arguments.json, arguments.figure)
    return _planned(config, arguments.json, arguments.figure)


def _search(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether layouts are to be searched, and the overrides."""
    asked = [word for word in words if word.partition("=")[0] == "search"]
    if bad := [word for word in asked if word not in ("search=true", "search=false")]:
        raise ConfigError(f"{bad[0]} is no choice; use search=true")
    return "search=true" in asked, [word for word in words if word not in asked]


def _read(overrides: Sequence[str]) -> "tuple[Config, list[str]]":
    """The configuration, and what is wrong with its layout; anything else wrong is raised."""
    from hlat.config.compose import composed
    from hlat.config.resolve import resolve, typed
    from hlat.planning.search import layout_problems

    tree = composed(overrides)
    config = typed(tree)
    problems = layout_problems(config)
    try:
        return resolve(tree), problems
    except ConfigError as error:
        if set(error.problems) <= set(problems):
            return config, problems
        raise


def _planned(config: "Config", as_json: bool, file: Path | None) -> int:
    """Tell a plan; if it does not fit, the nearest that do."""
    from hlat.planning.forecast import forecast
    from hlat.planning.search import search
    from hlat.reporting import plan as report

    plan = forecast(config)
    fitting = [] if plan.fits else _fitting(config, search(config))
    if as_json:
        told = report.summarise(config, plan)
        told["nearest"] = [report.summarise_layout(one) for one in fitting]
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(report.table(config, plan)))
        if not plan.fits:
            print(f"\n{report.misfit(config, plan.memory, plan.device_bytes)}")
            print("\n".join(report.alternatives(fitting)))
    if file is not None and not _drawn_plan(file, config, plan):
        return Exit.FAILED
    return Exit.FINISHED if plan.fits else Exit.CONFIGURATION


def _impossible(config: "Config", problems: Sequence[str], as_json: bool, file: Path | None) -> int:
    """Tell why processes cannot take a layout, the nearest that they can, and what fits."""
    from hlat.planning.forecast import forecast
    from hlat.planning.search import nearest, search
    from hlat.reporting import plan as report

    found = search(config)
    valid = [one.config for one in nearest(config, found, 1)]
    plans = [(other, forecast(other)) for other in valid]
    fitting = _fitting(config, found)
    if as_json:
        told = {
            "fits": False,
            "problems": list(problems),
            "nearest_valid": [report.summarise(other, plan) for other, plan in plans],
            "nearest": [report.summarise_layout(one) for one in fitting],
        }
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(f"infeasible: {problem}" for problem in problems))
        for other, plan in plans:
            print("\nthe nearest layout that these nodes can take:\n")
            print("\n".join(report.table(other, plan)))
            if not plan.fits:
                print(f"\n{report.misfit(other, plan.memory, plan.device_bytes)}")
        print("\n".join(report.alternatives(fitting)))
    for other, plan in plans:
        if file is not None and not _drawn_plan(file, other, plan):
            return Exit.FAILED
    return Exit.CONFIGURATION


def _ranked(config: "Config", as_json: bool) -> int:
    """Tell all valid layouts, the best of them first."""
    from hlat.planning.search import search
    from hlat.reporting import plan as report

    found = search(config)
    if as_json:
        print(json.dumps([report.summarise_layout(one) for one in found], indent=2))
    else:
        print("\n".join(report.ranking(config, found)))
    return Exit.FINISHED if any(one.fits for one in found) else Exit.CONFIGURATION


def _fitting(config: "Config", found: "Sequence[Layout]") -> "list[Layout]":
    """Of the layouts found on the run's nodes, and on more, those that fit and differ least."""
    from hlat.planning.search import nearest, on_more_nodes

    own = nearest(config, [one for one in found if one.fits], _NEAREST)
    return own + nearest(config, on_more_nodes(config), _NEAREST)


def _check_ending(file: Path | None) -> None:
    if file is not None and file.suffix not in _ENDINGS:
        raise ConfigError(f"--figure {file} must end in {' or '.join(_ENDINGS)}")


def _drawn_plan(file: Path, config: "Config", plan: "Forecast") -> bool:
    """Draw a plan into a file; whether it could be written."""
    from hlat.reporting import plan_figure

    return _drawn(file, lambda: plan_figure.write(file, config, plan))


def _drawn(file: Path, draw: Callable[[], None]) -> bool:
    """Draw a figure into a file; whether it could be written."""
    try:
        draw()
    except OSError as error:
        print(f"--figure {file} cannot be written ({error.strerror})", file=sys.stderr)
        return False
    print(f"drew {file}", file=sys.stderr)
    return True


def _failures(words: Sequence[str]) -> int:
    """Plan for failures."""
    parser = Parser(
        prog="python -m hlat.plan failures",
        description="What failures cost a run, and how often it should save.",
        epilog=_FAILURES,
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="KEY=VALUE", help="what differs from the scenario")
    add("--json", action="store_true", help="print all numbers as JSON")
    add("--figure", type=Path, metavar="FILE", help="draw goodput over the interval (svg or png)")
    arguments = parser.parse_intermixed_args(words)
    from hlat.planning import failures
    from hlat.reporting import failure_figure
    from hlat.reporting.failures import summarise, table

    file = arguments.figure
    _check_ending(file)
    scenario, sources, trials, seed = _scenario(parser, arguments.settings)
    failures.refuse_impossible(scenario, trials)
    plan = summarise(scenario, failures.simulate(scenario, trials, seed), sources)
    print(json.dumps(plan, indent=2) if arguments.json else "\n".join(table(plan)))
    if file is not None:
        swept = failure_figure.sweep(scenario, trials, seed)
        if not _drawn(file, lambda: failure_figure.write(file, swept)):
            return Exit.FAILED
    return Exit.FINISHED


def _cost(words: Sequence[str]) -> int:
    """Tell what tokens cost over numbers of nodes."""
    parser = Parser(
        "python -m hlat.plan cost", "Cost per 4 million tokens over numbers of nodes.", _COST
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw them (svg or png)")
    arguments = parser.parse_args(words)
    from hlat.planning import cost
    from hlat.reporting import cost_figure
    from hlat.reporting.wording import columns

    file = arguments.figure
    _check_ending(file)
    whole, found = cost.baseline(), [*cost.planned(), *cost.published()]
    if arguments.json:
        print(json.dumps({"baseline_usd": whole, "costs": [vars(one) for one in found]}, indent=2))
    else:
        heads = ("Run", "Nodes", "USD per 4 M tokens", f"Of {whole:.3f} USD")
        print("\n".join(columns(heads, cost_figure.table(found, whole))))
    if file is not None and not _drawn(file, lambda: cost_figure.picture(found, whole).write(file)):
        return Exit.FAILED
    return Exit.FINISHED


def _scenario(parser: Parser, words: Sequence[str]) -> "tuple[Scenario, dict[str, str], int, int]":
    """The scenario that the words describe, where its numbers come from, trials and seed."""
    from hlat.planning.failures import Scenario
    from hlat.planning.scenarios import compose

    names = [field.name for field in fields(Scenario)] + ["trials", "seed"]
    whole = {field.name for field in fields(Scenario) if field.type is int} | {"trials", "seed"}
    known: dict[str, Callable[[str], Any]] = {
        name: partial(number, whole=name in whole, positive=name not in _MAY_BE_ZERO)
        for name in names
    }
    given = parser.settings(words, {"scenario": str, **known})
    name, trials, seed = (given.pop(*default) for default in _DEFAULTS.items())
    return *compose(name, given), trials, seed


def _from_nxdt(typed: Sequence[str]) -> int:
    """Translate a configuration of NxDT."""
    parser = Parser(
        prog="python -m hlat.plan from_nxdt",
        usage="python -m hlat.plan from_nxdt=FILE.yaml",
        description="A run of NeuronX Distributed Training in overrides of hlat.",
        epilog=_FROM_NXDT,
    )
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="its configuration")
    file = parser.parse_args(typed).file
    from hlat.config.compose import models
    from hlat.config.foreign import read_yaml, shown
    from hlat.planning.nxdt.file import read
    from hlat.planning.nxdt.translate import STAND_INS, translate, words
    from hlat.reporting.nxdt import page

    tree = read_yaml(file)
    try:
        run = read(tree)
    except ConfigError as error:
        raise ConfigError(f"{shown(file, 200)} {error}") from error
    if run.hf:
        run = read(tree, _model_config(file, run.get("model.model_config")))
    translation = translate(run, models())
    refused = _refused(words(translation.overrides, translation.unset, STAND_INS))
    print("\n".join(page(file.name, translation, refused)))
    return Exit.CONFIGURATION if refused else Exit.FINISHED


def _model_config(file: Path, named: Any) -> Any:
    """Return what the config.json of an hf model holds; None: it is not here."""
    from hlat.config.foreign import read_json

    places = [Path(named), file.parent / Path(named).name] if isinstance(named, str) else []
    found = next((place for place in places if os.path.exists(place)), None)  # whatever its name
    if found is None:
        return None
    numbers = read_json(found)
    if not isinstance(numbers, dict):
        raise ConfigError(f"{found} cannot be read: it holds no object")
    return numbers


def _refused(words: Sequence[str]) -> Sequence[str]:
    """Return why hlat.train would not run these overrides."""
    from hlat.config.compose import composed
    from hlat.config.resolve import resolve
    from hlat.planning.feasibility import refuse_infeasible

    try:
        refuse_infeasible(resolve(composed(words)))
    except ConfigError as error:
        return error.problems
    return ()


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "failures": _failures,
    "cost": _cost,
    "from_nxdt": _from_nxdt,
}

if __name__ == "__main__":
    leave(main)
