"""Predict memory, step time and cost of a run before a node is booked: `hlat plan`.

Other actions are functions in `_ACTIONS`: `calibrate`, `failures`, `cost` and
`from_nxdt=FILE.yaml`.
"""

import argparse
import difflib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.argument_parser import (
    CommandLineParser,
    parse_file_name,
    parse_number,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.plan.budget_settings import (
    add_budget_settings,
    plan_configured_budget,
    validate_budget_settings,
)

if TYPE_CHECKING:
    from hlat.config.run import Config
    from hlat.figures.report_figure import ReportFigure
    from hlat.plan.forecast import RunForecast
    from hlat.plan.layout_search import LayoutCandidate

_PLAN_EXAMPLES = """\
actions:
  calibrate       fit the constants of the hardware to step times of runs, or suggest runs
  failures        uptime, goodput and the best checkpoint interval, by formula and by simulation
  cost            cost per 4 million tokens over numbers of nodes: the HLAT paper's figure 5
  from_nxdt=FILE  overrides of hlat for a configuration of NeuronX Distributed Training

examples:
  hlat plan model=70b precision=mixed hardware=trn1_32xl hardware.nodes=4
  hlat plan model=70b precision=mixed hardware=trn1_32xl hardware.nodes=256 search=true
  hlat plan model=llama3_8b hardware=h100_p5 budget_usd=50000 days=30
  hlat plan config_json=Qwen3-8B/config.json hardware=h100_p5 search=true
  hlat plan +sweep=beta2                      runs, cost and power of a study
  hlat plan calibrate suggest=true model=7b hardware=h100_p5
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
is planned too, with constants that are not fitted to the figure: docs/planning.md.

example:
  hlat plan cost figure=figures/cost.png"""

_NUM_NEAREST = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return the exit code."""
    first, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    return run_command(lambda: _run_action(first, rest), None)


def _run_action(first: str, rest: Sequence[str]) -> int:
    action, equals, value = first.partition("=")
    if action in _ACTIONS:
        return _ACTIONS[action]([value, *rest] if equals else rest)
    # Only from_nxdt has a value; other words with one are settings or overrides, such as figure=
    similar = [name for name in _ACTIONS if (name == "from_nxdt") == bool(equals)]
    near = difflib.get_close_matches(action, similar, 1)
    if not first.startswith("-") and (near or not equals):
        hint = f"did you mean {near[0]}?" if near else f"actions: {', '.join(_ACTIONS)}"
        raise ConfigError(f"{action} is not an action of hlat plan; {hint}")
    return _run_plan([first, *rest])


def _run_plan(argv: Sequence[str]) -> int:
    """Plan a run, or search its layouts."""
    parser = CommandLineParser(
        "plan",
        "Predict memory, step time and cost of what hlat train would run.",
        _PLAN_EXAMPLES,
        takes_overrides=True,
    )
    parser.add_overrides("overrides of hlat train, or an action")
    search = "search all valid layouts on these nodes: the fastest, and why the configured one is "
    search += "not; on hardware without constants those with the least memory"
    parser.add_argument("--search", action="store_true", help=search)
    mfu = "assume this fraction of the hardware's dense peak, such as 0.4, for time and price"
    parser.add_argument("--mfu", type=_parse_mfu, metavar="FRACTION", help=mfu)
    config_json = "plan the model of a Hugging Face config.json, instead of model="
    parser.add_argument("--config-json", type=Path, metavar="FILE", help=config_json)
    add_budget_settings(parser)
    _add_output_settings(parser, "draw memory and step time (svg or png)")
    arguments = parser.parse(argv)
    if arguments.search and arguments.figure is not None:
        raise ConfigError(f"figure={arguments.figure} shows one layout; remove search=true")
    if arguments.mfu is not None and (arguments.search or _is_sweep(arguments.overrides)):
        raise ConfigError(f"mfu={arguments.mfu:g} is for the plan of one layout; remove it")
    validate_budget_settings(arguments)
    _validate_keys(parser, arguments.overrides)
    if arguments.config_json is None:
        return _run_configured_plan(arguments)
    from hlat.plan.hugging_face_model import build_model_overrides

    words = build_model_overrides(arguments.config_json, arguments.overrides)
    arguments.overrides = [*words, *arguments.overrides]
    code = _run_configured_plan(arguments)
    if not arguments.json:
        print(f"\nto train this model: hlat train {shlex.join(words)}")
    return code


def _validate_keys(parser: CommandLineParser, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a misspelled setting of the command, which is no key of a run."""
    from hlat.config.run import Config

    keys = {field.name for field in fields(Config)}
    for word in overrides:
        key, equals, _ = word.partition("=")
        near = difflib.get_close_matches(key, parser.list_keys(), 1, cutoff=0.75)
        if equals and near and key.isidentifier() and key not in keys:
            raise ConfigError(f"{key}= is not a setting of hlat plan; did you mean {near[0]}=?")


def _run_configured_plan(arguments: argparse.Namespace) -> int:
    """Plan the run, study or budget of the overrides."""
    if _is_sweep(arguments.overrides):
        return _plan_study(arguments)
    config, problems = _load_config(arguments.overrides)
    if arguments.budget_usd is not None:
        from hlat.plan.budget_text import format_budget, summarize_budget

        budget = plan_configured_budget(config, arguments)
        _print_result(
            arguments, summarize_budget(budget), format_budget(budget, arguments.overrides)
        )
        return ExitCode.FINISHED
    if arguments.search:
        return _print_search(config, problems, arguments)
    return _print_plan(config, problems, arguments)


def _is_sweep(overrides: Sequence[str]) -> bool:
    """Return True for a study, or for overrides with several values."""
    from hlat.config.sweep_axes import is_sweep

    return is_sweep(overrides)


def _plan_study(arguments: argparse.Namespace) -> ExitCode:
    """Print runs, cost and power of a study; fail if it exceeds its budget."""
    from hlat.plan import study_forecast

    if arguments.search or arguments.figure is not None:
        raise ConfigError("search= and figure= plan one run; remove them, or the sweep")
    forecast = study_forecast.forecast_study(arguments.overrides)
    lines = study_forecast.format_forecast(forecast)
    _print_result(arguments, study_forecast.summarize_forecast(forecast), lines)
    return ExitCode.CONFIGURATION if forecast.budget_problems else ExitCode.FINISHED


def _add_output_settings(parser: CommandLineParser, figure_help: str) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print all numbers as JSON")
    parse_name = partial(parse_file_name, suffixes=(".png", ".svg"))
    add("--figure", type=parse_name, metavar="FILE", help=figure_help)


def _parse_mfu(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction above 0, up to 1, such as 0.4")
    return value


def _print_result(arguments: argparse.Namespace, summary: Any, lines: Iterable[str]) -> None:
    print(json.dumps(summary, indent=2) if arguments.json else "\n".join(lines))


def _save_figure(arguments: argparse.Namespace, build_figure: "Callable[[], ReportFigure]") -> None:
    """Draw a figure if its path is given; raise OSError if the file cannot be written."""
    if arguments.figure is not None:
        build_figure().save(arguments.figure)
        print(f"drew {arguments.figure}", file=sys.stderr)


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


def _print_plan(
    config: "Config", problems: Sequence[str], arguments: argparse.Namespace
) -> ExitCode:
    """Print a plan, or the reasons why the layout is invalid and the nearest valid layout.

    If it does not fit, print the nearest layouts that do.
    """
    from hlat.plan import plan_text
    from hlat.plan.forecast import forecast_run
    from hlat.plan.layout_search import find_nearest_layouts, search_layouts

    plans = [] if problems else [(config, forecast_run(config, arguments.mfu))]
    fits = all(plan.fits for _, plan in plans) and not problems
    layouts = [] if fits else search_layouts(config)
    if problems:
        nearest = find_nearest_layouts(config, layouts, 1)
        plans = [(one.config, forecast_run(one.config, arguments.mfu)) for one in nearest]
    fitting = [] if fits else _find_fitting_layouts(config, layouts)
    summaries = [plan_text.summarize_plan(*plan) for plan in plans]
    summary: dict[str, Any] = (
        {"fits": False, "problems": list(problems), "nearest_valid": summaries}
        if problems
        else summaries[0]
    )
    summary["nearest"] = [plan_text.summarize_layout(layout) for layout in fitting]
    lines = [f"infeasible: {problem}" for problem in problems]
    for planned, plan in plans:
        if problems:
            lines += ["", "the nearest layout that these nodes can take:", ""]
        lines += plan_text.format_plan(planned, plan)
        if not plan.fits:
            capacity = plan.device_memory_bytes
            lines += ["", plan_text.format_infeasible_plan(planned, plan.memory, capacity)]
    if not fits:
        lines += plan_text.format_alternatives(fitting, arguments.overrides)
    _print_result(arguments, summary, lines)
    for planned, plan in plans:
        _save_figure(arguments, partial(_build_plan_figure, planned, plan))
    return ExitCode.FINISHED if fits else ExitCode.CONFIGURATION


def _build_plan_figure(config: "Config", plan: "RunForecast") -> "ReportFigure":
    from hlat.plan import plan_figure  # drawing is slow to import

    return plan_figure.build_plan_figure(config, plan)


def _print_search(
    config: "Config", problems: Sequence[str], arguments: argparse.Namespace
) -> ExitCode:
    """Print the best layouts, and why the configured one is not the first."""
    from hlat.plan import search_text
    from hlat.plan.configured_layout import explain_configured
    from hlat.plan.layout_search import search_layouts

    layouts = search_layouts(config)
    own = explain_configured(config, problems, layouts)
    summary = search_text.summarize_search(layouts, own)
    _print_result(
        arguments, summary, search_text.format_search(config, layouts, own, arguments.overrides)
    )
    return ExitCode.FINISHED if any(layout.fits for layout in layouts) else ExitCode.CONFIGURATION


def _find_fitting_layouts(
    config: "Config", layouts: "Sequence[LayoutCandidate]"
) -> "list[LayoutCandidate]":
    """Return the layouts that fit and differ least, on the run's nodes and on more nodes."""
    from hlat.plan.layout_search import find_nearest_layouts, search_more_nodes

    fitting = [layout for layout in layouts if layout.fits]
    nearest = find_nearest_layouts(config, fitting, _NUM_NEAREST)
    return nearest + find_nearest_layouts(config, search_more_nodes(config), _NUM_NEAREST)


def _run_failures(argv: Sequence[str]) -> int:
    """Print what failures cost a run, and how often it should save."""
    from hlat.plan import checkpoint_interval_figure, failure_model
    from hlat.plan.failure_plan_text import format_failure_plan, summarize_failure_plan

    parser = CommandLineParser(
        "plan failures",
        "Predict what failures cost a run, and how often it should save.",
        _FAILURES_EXAMPLES,
    )
    add = parser.add_argument
    scenario_help = "automatic: HLAT-7B with automatic recovery; manual: the paper's run without"
    add("--scenario", default="automatic", metavar="NAME", help=scenario_help)
    settings = fields(failure_model.FailureScenario)
    for field in settings:
        integer, positive = field.type is int, field.metadata["positive"]
        parse = partial(parse_number, integer=integer, positive=positive)
        flag, metavar = f"--{field.name.replace('_', '-')}", "N" if integer else "X"
        add(flag, type=parse, metavar=metavar, help=field.metadata["help"])
    parse_trials = partial(parse_number, integer=True, positive=True)
    add("--trials", type=parse_trials, default=1000, metavar="N", help="simulated runs (1000)")
    parse_seed = partial(parse_number, integer=True, positive=False)
    add("--seed", type=parse_seed, default=0, metavar="N", help="seed of the simulation (0)")
    _add_output_settings(parser, "draw goodput over the checkpoint interval (svg or png)")
    arguments = parser.parse(argv)
    values = {field.name: getattr(arguments, field.name) for field in settings}
    given = {key: value for key, value in values.items() if value is not None}
    scenario, sources = failure_model.build_scenario(arguments.scenario, given)
    trials, seed = arguments.trials, arguments.seed
    failure_model.validate_scenario(scenario, trials)
    simulated = failure_model.simulate_failures(scenario, trials, seed)
    plan = summarize_failure_plan(scenario, simulated, sources)
    _print_result(arguments, plan, format_failure_plan(plan))
    build = checkpoint_interval_figure.build_interval_figure
    _save_figure(arguments, partial(build, scenario, trials, seed))
    return ExitCode.FINISHED


def _run_cost(argv: Sequence[str]) -> int:
    """Print the cost of tokens over numbers of nodes."""
    from hlat.plan import cost_figure, token_cost
    from hlat.tracking.text_format import format_table

    parser = CommandLineParser(
        "plan cost", "Print the cost per 4 million tokens over numbers of nodes.", _COST_EXAMPLES
    )
    _add_output_settings(parser, "draw the costs (svg or png)")
    arguments = parser.parse(argv)
    baseline_usd = token_cost.compute_baseline_cost()
    costs = [*token_cost.compute_planned_costs(), *token_cost.compute_published_costs()]
    summary = {"baseline_usd": baseline_usd, "costs": [vars(cost) for cost in costs]}
    headers = ("Run", "Nodes", "USD per 4 M tokens", f"Of {baseline_usd:.3f} USD")
    rows = cost_figure.build_cost_table(costs, baseline_usd)
    _print_result(arguments, summary, format_table(headers, rows))
    _save_figure(arguments, lambda: cost_figure.build_cost_figure(costs, baseline_usd))
    return ExitCode.FINISHED


def _run_from_nxdt(argv: Sequence[str]) -> int:
    """Translate a configuration of NxDT."""
    from hlat.plan.nxdt.nxdt_command import run_from_nxdt

    return run_from_nxdt(argv)


def _run_calibrate(argv: Sequence[str]) -> int:
    """Fit constants to measured runs."""
    from hlat.plan.calibrate_command import run_calibrate

    return run_calibrate(argv)


_ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "calibrate": _run_calibrate,
    "failures": _run_failures,
    "cost": _run_cost,
    "from_nxdt": _run_from_nxdt,
}

if __name__ == "__main__":
    run_and_exit(main)
