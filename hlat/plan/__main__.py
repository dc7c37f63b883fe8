"""Predict memory, step time and cost of a run before a node is booked: `hlat plan`.

Three actions plan something else, each with a function of its own in `_ACTIONS`: `failures`,
`cost`, and `from_nxdt=FILE.yaml`.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.argument_parser import CommandLineParser, parse_number, run_and_exit
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.config.run import Config
    from hlat.plan.failure_model import FailureScenario
    from hlat.plan.forecast import RunForecast
    from hlat.plan.layout_search import LayoutCandidate

_PLAN_EXAMPLES = """\
actions:
  failures        uptime, goodput and the best checkpoint interval, by formula and by simulation
  cost            cost per 4 million tokens over numbers of nodes: the HLAT paper's figure 5
  from_nxdt=FILE  overrides of hlat for a configuration of NeuronX Distributed Training

examples:
  hlat plan model=70b precision=mixed hardware=trn1_32xl hardware.nodes=4
  hlat plan model=70b precision=mixed hardware=trn1_32xl hardware.nodes=256 search=true
  hlat plan failures nodes=256
  hlat plan from_nxdt=hf_llama3_8B_config.yaml

The exit code is 2 if the run does not fit or violates a rule. `hlat plan ACTION --help` prints the
settings of an action; docs/planning.md has the formulas."""

_FAILURES_EXAMPLES = """\
examples:
  hlat plan failures
  hlat plan failures scenario=manual every_steps=300
  hlat plan failures nodes=256 save_stall_s=2 save_write_s=60 figure=goodput.svg

docs/failures.md has the formulas and the sources of the numbers."""

_COST_EXAMPLES = """\
Costs are shares of the paper's baseline, 7B on four p4d nodes at the paper's prices. The baseline
is planned too, with constants fitted to the figure: docs/planning.md.

example:
  hlat plan cost figure=figures/cost.png"""

_FROM_NXDT_EXAMPLES = """\
Print the command that trains the same model, the settings that the file does not have, and every
other key of the file with the reason why it is not translated. The sizes of an hf model are read
from the config.json that the file names, at its path or beside the file. Interpolations in either
file are not resolved. The exit code is 2 if hlat train would reject the command.

example:
  hlat plan from_nxdt=hf_llama3_8B_config.yaml

docs/nxdt.md lists the keys."""

_FAILURES_HELP = {
    "scenario": "automatic: HLAT-7B with automatic recovery; manual: the paper's run without",
    "nodes": "nodes that must all work",
    "mtbf_h": "mean hours between failures of one node",
    "detect_s": "seconds until a failure is detected",
    "response_s": "mean seconds until the restart begins (log-normal)",
    "restart_s": "seconds until processes have started; failures in this time count",
    "load_s": "seconds to load the checkpoint; failures in this time count",
    "save_stall_s": "seconds for which a save stops training",
    "save_write_s": "seconds from the stall until the checkpoint is durable",
    "step_s": "seconds of a training step",
    "every_steps": "steps between saves",
    "steps": "steps of the run, rounded up to whole intervals",
    "trials": "simulated runs (1000)",
    "seed": "seed of the simulation (0)",
}
_EXIT_INTERRUPTED = 130
_FIGURE_SUFFIXES = (".png", ".svg")
_NUM_NEAREST = 3
_NON_NEGATIVE_KEYS = {
    *("detect_s", "response_s", "restart_s", "load_s", "save_stall_s", "save_write_s", "seed")
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return the exit code."""
    first, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    action, equals, value = first.partition("=")
    try:
        if action in _ACTIONS:
            return _ACTIONS[action]([value, *rest] if equals else rest)
        near = difflib.get_close_matches(action, _ACTIONS, 1)
        if not first.startswith("-") and (near or not equals):
            hint = f"did you mean {near[0]}?" if near else f"actions: {', '.join(_ACTIONS)}"
            raise ConfigError(f"{action} is not an action of hlat plan; {hint}")
        return _run_plan([first, *rest])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIGURATION
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _run_plan(argv: Sequence[str]) -> int:
    """Plan a run, or search its layouts."""
    parser = CommandLineParser(
        "plan",
        "Predict memory, step time and cost of what hlat train would run.",
        _PLAN_EXAMPLES,
        takes_overrides=True,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="overrides of hlat train, or an action")
    search = "list every valid layout of the model on these nodes, fastest first"
    add("--search", action="store_true", help=search)
    _add_output_settings(parser, "draw memory and step time (svg or png)")
    arguments = parser.parse(argv)
    if arguments.search and arguments.figure is not None:
        raise ConfigError(f"figure={arguments.figure} shows one layout; remove search=true")
    _validate_figure_path(arguments.figure)
    config, problems = _load_config(arguments.overrides)
    if arguments.search:
        return _print_ranking(config, arguments.json)
    if problems:
        return _print_infeasible_layout(config, problems, arguments.json, arguments.figure)
    return _print_plan(config, arguments.json, arguments.figure)


def _add_output_settings(parser: CommandLineParser, figure_help: str) -> None:
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    parser.add_argument("--figure", type=Path, metavar="FILE", help=figure_help)


def _load_config(overrides: Sequence[str]) -> "tuple[Config, list[str]]":
    """Return the configuration and the problems of its layout; raise ConfigError for others."""
    from hlat.config.compose import compose_config
    from hlat.config.resolve import convert_to_dataclasses, resolve_config
    from hlat.plan.layout_search import find_layout_problems

    tree = compose_config(overrides)
    config = convert_to_dataclasses(tree)
    problems = find_layout_problems(config)
    try:
        return resolve_config(tree), problems
    except ConfigError as error:
        if set(error.problems) <= set(problems):
            return config, problems
        raise


def _print_plan(config: "Config", as_json: bool, figure_path: Path | None) -> int:
    """Print a plan and, if it does not fit, the nearest layouts that do."""
    from hlat.plan.forecast import forecast_run
    from hlat.plan.layout_search import search_layouts
    from hlat.report import plan_text as report

    plan = forecast_run(config)
    fitting = [] if plan.fits else _find_fitting_layouts(config, search_layouts(config))
    if as_json:
        summary = report.summarize_plan(config, plan)
        summary["nearest"] = [report.summarize_layout(layout) for layout in fitting]
        print(json.dumps(summary, indent=2))
    else:
        print("\n".join(report.format_plan(config, plan)))
        if not plan.fits:
            print(
                f"\n{report.format_infeasible_plan(config, plan.memory, plan.device_memory_bytes)}"
            )
            print("\n".join(report.format_alternatives(fitting)))
    if figure_path is not None and not _draw_plan(figure_path, config, plan):
        return ExitCode.FAILED
    return ExitCode.FINISHED if plan.fits else ExitCode.CONFIGURATION


def _print_infeasible_layout(
    config: "Config", problems: Sequence[str], as_json: bool, figure_path: Path | None
) -> int:
    """Print why a layout is invalid, the nearest valid layouts, and those that fit."""
    from hlat.plan.forecast import forecast_run
    from hlat.plan.layout_search import find_nearest_layouts, search_layouts
    from hlat.report import plan_text as report

    layouts = search_layouts(config)
    valid = [layout.config for layout in find_nearest_layouts(config, layouts, 1)]
    plans = [(other, forecast_run(other)) for other in valid]
    fitting = _find_fitting_layouts(config, layouts)
    if as_json:
        summary = {
            "fits": False,
            "problems": list(problems),
            "nearest_valid": [report.summarize_plan(other, plan) for other, plan in plans],
            "nearest": [report.summarize_layout(layout) for layout in fitting],
        }
        print(json.dumps(summary, indent=2))
    else:
        print("\n".join(f"infeasible: {problem}" for problem in problems))
        for other, plan in plans:
            print("\nthe nearest layout that these nodes can take:\n")
            print("\n".join(report.format_plan(other, plan)))
            if not plan.fits:
                memory, capacity = plan.memory, plan.device_memory_bytes
                print(f"\n{report.format_infeasible_plan(other, memory, capacity)}")
        print("\n".join(report.format_alternatives(fitting)))
    for other, plan in plans:
        if figure_path is not None and not _draw_plan(figure_path, other, plan):
            return ExitCode.FAILED
    return ExitCode.CONFIGURATION


def _print_ranking(config: "Config", as_json: bool) -> int:
    """Print all valid layouts, best first."""
    from hlat.plan.layout_search import search_layouts
    from hlat.report import plan_text as report

    layouts = search_layouts(config)
    if as_json:
        print(json.dumps([report.summarize_layout(layout) for layout in layouts], indent=2))
    else:
        print("\n".join(report.format_ranking(config, layouts)))
    return ExitCode.FINISHED if any(layout.fits for layout in layouts) else ExitCode.CONFIGURATION


def _find_fitting_layouts(
    config: "Config", layouts: "Sequence[LayoutCandidate]"
) -> "list[LayoutCandidate]":
    """Return the layouts that fit and differ least, on the run's nodes and on more nodes."""
    from hlat.plan.layout_search import find_nearest_layouts, search_more_nodes

    fitting = [layout for layout in layouts if layout.fits]
    nearest = find_nearest_layouts(config, fitting, _NUM_NEAREST)
    return nearest + find_nearest_layouts(config, search_more_nodes(config), _NUM_NEAREST)


def _validate_figure_path(figure_path: Path | None) -> None:
    if figure_path is not None and figure_path.suffix not in _FIGURE_SUFFIXES:
        raise ConfigError(f"figure={figure_path} must end in {' or '.join(_FIGURE_SUFFIXES)}")


def _draw_plan(figure_path: Path, config: "Config", plan: "RunForecast") -> bool:
    """Draw a plan; return True if the file was written."""
    from hlat.report import plan_figure

    return _draw_figure(
        figure_path, lambda: plan_figure.build_plan_figure(config, plan).save(figure_path)
    )


def _draw_figure(figure_path: Path, draw: Callable[[], None]) -> bool:
    """Draw a figure; return True if the file was written."""
    try:
        draw()
    except OSError as error:
        print(f"figure={figure_path} cannot be written ({error.strerror})", file=sys.stderr)
        return False
    print(f"drew {figure_path}", file=sys.stderr)
    return True


def _run_failures(argv: Sequence[str]) -> int:
    """Print what failures cost a run, and how often it should save."""
    from hlat.plan import failure_model
    from hlat.report import checkpoint_interval_figure
    from hlat.report.failure_plan_text import format_failure_plan, summarize_failure_plan

    arguments = _build_failures_parser().parse(argv)
    figure_path = arguments.figure
    _validate_figure_path(figure_path)
    scenario, sources = _build_scenario(arguments)
    trials, seed = arguments.trials, arguments.seed
    failure_model.validate_scenario(scenario, trials)
    simulated = failure_model.simulate_failures(scenario, trials, seed)
    plan = summarize_failure_plan(scenario, simulated, sources)
    print(json.dumps(plan, indent=2) if arguments.json else "\n".join(format_failure_plan(plan)))
    if figure_path is None:
        return ExitCode.FINISHED
    sweep = checkpoint_interval_figure.sweep_checkpoint_intervals(scenario, trials, seed)
    figure = checkpoint_interval_figure.build_interval_figure(sweep)
    was_drawn = _draw_figure(figure_path, lambda: figure.save(figure_path))
    return ExitCode.FINISHED if was_drawn else ExitCode.FAILED


def _build_failures_parser() -> CommandLineParser:
    from hlat.plan.failure_model import FailureScenario

    parser = CommandLineParser(
        "plan failures",
        "Predict what failures cost a run, and how often it should save.",
        _FAILURES_EXAMPLES,
    )
    add = parser.add_argument
    add("--scenario", default="automatic", metavar="NAME", help=_FAILURES_HELP["scenario"])
    integers = {field.name for field in fields(FailureScenario) if field.type is int}
    for name in [field.name for field in fields(FailureScenario)] + ["trials", "seed"]:
        is_integer = name in integers or name in ("trials", "seed")
        parse = partial(parse_number, integer=is_integer, positive=name not in _NON_NEGATIVE_KEYS)
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=parse, metavar="N" if is_integer else "X", help=_FAILURES_HELP[name])
    parser.set_defaults(trials=1000, seed=0)
    _add_output_settings(parser, "draw goodput over the checkpoint interval (svg or png)")
    return parser


def _build_scenario(arguments: argparse.Namespace) -> "tuple[FailureScenario, dict[str, str]]":
    """Return the scenario with the settings of the command line, and the source of each number."""
    from hlat.plan.failure_model import FailureScenario
    from hlat.plan.failure_scenarios import build_scenario

    values = {field.name: getattr(arguments, field.name) for field in fields(FailureScenario)}
    given = {name: value for name, value in values.items() if value is not None}
    return build_scenario(arguments.scenario, given)


def _run_cost(argv: Sequence[str]) -> int:
    """Print the cost of tokens over numbers of nodes."""
    from hlat.plan import token_cost
    from hlat.report import cost_figure
    from hlat.report.text_format import format_table

    parser = CommandLineParser(
        "plan cost", "Print the cost per 4 million tokens over numbers of nodes.", _COST_EXAMPLES
    )
    _add_output_settings(parser, "draw the costs (svg or png)")
    arguments = parser.parse(argv)
    figure_path = arguments.figure
    _validate_figure_path(figure_path)
    baseline_usd = token_cost.compute_baseline_cost()
    costs = [*token_cost.compute_planned_costs(), *token_cost.compute_published_costs()]
    if arguments.json:
        summary = {"baseline_usd": baseline_usd, "costs": [vars(cost) for cost in costs]}
        print(json.dumps(summary, indent=2))
    else:
        headers = ("Run", "Nodes", "USD per 4 M tokens", f"Of {baseline_usd:.3f} USD")
        rows = cost_figure.build_cost_table(costs, baseline_usd)
        print("\n".join(format_table(headers, rows)))
    if figure_path is None:
        return ExitCode.FINISHED
    figure = cost_figure.build_cost_figure(costs, baseline_usd)
    was_drawn = _draw_figure(figure_path, lambda: figure.save(figure_path))
    return ExitCode.FINISHED if was_drawn else ExitCode.FAILED


def _run_from_nxdt(argv: Sequence[str]) -> int:
    """Translate a configuration of NxDT."""
    parser = CommandLineParser(
        "plan from_nxdt",
        "Translate a configuration of NeuronX Distributed Training to overrides of hlat.",
        _FROM_NXDT_EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the configuration")
    file = parser.parse(argv).file
    from hlat.config.compose import load_model_presets
    from hlat.config.untrusted_files import format_value, load_untrusted_yaml
    from hlat.plan.nxdt.nxdt_config import parse_nxdt_config
    from hlat.plan.nxdt.nxdt_translation import (
        PLACEHOLDERS,
        format_overrides,
        translate_nxdt_config,
    )
    from hlat.report.nxdt_translation_text import format_translation

    tree = load_untrusted_yaml(file)
    try:
        run = parse_nxdt_config(tree)
    except ConfigError as error:
        raise ConfigError(f"{format_value(file, 200)} {error}") from error
    if run.is_hf:
        run = parse_nxdt_config(tree, _load_model_config(file, run.get("model.model_config")))
    translation = translate_nxdt_config(run, load_model_presets())
    refused = _find_problems(
        format_overrides(translation.overrides, translation.unset, PLACEHOLDERS)
    )
    print("\n".join(format_translation(file.name, translation, refused)))
    return ExitCode.CONFIGURATION if refused else ExitCode.FINISHED


def _load_model_config(yaml_path: Path, model_config_path: Any) -> Any:
    """Return the content of the config.json of an hf model, or None if it does not exist."""
    from hlat.config.untrusted_files import load_untrusted_json

    if not isinstance(model_config_path, str):
        return None
    candidates = [Path(model_config_path), yaml_path.parent / Path(model_config_path).name]
    for path in filter(os.path.exists, candidates):  # unlike Path.exists, accepts any name
        content = load_untrusted_json(path)
        if not isinstance(content, dict):
            raise ConfigError(f"{path} cannot be read: it is not a JSON object")
        return content
    return None


def _find_problems(overrides: Sequence[str]) -> Sequence[str]:
    """Return the problems for which hlat train would reject these overrides."""
    from hlat.config.compose import compose_config
    from hlat.config.resolve import resolve_config
    from hlat.plan.feasibility import validate_feasibility

    try:
        validate_feasibility(resolve_config(compose_config(overrides)))
    except ConfigError as error:
        return error.problems
    return ()


_ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "failures": _run_failures,
    "cost": _run_cost,
    "from_nxdt": _run_from_nxdt,
}

if __name__ == "__main__":
    run_and_exit(main)
