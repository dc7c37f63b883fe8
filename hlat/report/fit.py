"""Fit scaling laws to runs or to points of a file, and register predictions: `hlat fit`."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import (
    CommandLineParser,
    build_list_parser,
    parse_number,
    parse_positive_int,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.config.run import Config
    from hlat.study.scaling_fit import ScalingFit
    from hlat.study.scaling_points import PointColumns, ScalingPoints

_EXAMPLES = """\
Parameters, tokens and FLOPs of a run follow from its configuration. Its metric is a column of
`hlat runs`. Without a column of tokens or FLOPs in a file, FLOPs are 6 parameters x tokens.

examples:
  hlat fit runs                                           all finished runs in runs/
  hlat fit runs where="precision=mixed" metric=heldout_bits_per_byte.code output=fit
  hlat fit runs compute=1e17,1e18                         best sizes and losses of these budgets
  hlat fit runs max_flops=1e17                            predict the larger runs of the root
  hlat fit runs group=run.seed                            a bootstrap of whole seeds
  hlat fit runs predict="model=tiny run.name=large"       register a prediction before that run
  hlat fit data=points.csv parameters="Model Size" flops="Training FLOP" metric=loss
  hlat fit data=points.csv learning_rate=LR batch=Batch   best rate and batch over compute

See docs/scaling.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fits; return the exit code."""
    arguments = _build_parser().parse(list(sys.argv[1:] if argv is None else argv))
    return run_command(lambda: _run(arguments), "the fit cannot be written")


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "fit",
        "Fit L = E + A / N^alpha + B / D^beta to finished runs or to the points of a CSV file,\n"
        "with bootstrap intervals, IsoFLOP curves and the best model of a compute budget.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUNS", help="roots of runs, or runs")
    add("--data", type=Path, metavar="FILE", help="CSV file of points, instead of runs")
    add("--where", metavar="EXPRESSION", help="filter of the runs, as in hlat runs")
    add("--metric", metavar="COLUMN", help="loss (heldout_bits_per_byte; of a file: loss)")
    add("--parameters", default="parameters", metavar="COLUMN", help="parameters (parameters)")
    add("--tokens", metavar="COLUMN", help="training tokens (tokens)")
    add("--flops", metavar="COLUMN", help="training FLOPs (flops)")
    add("--group", metavar="COLUMN", help="resample whole groups with equal values, not points")
    accuracy = "accuracy of a task to predict from the loss, such as scores.TASK of runs"
    add("--accuracy", metavar="COLUMN", help=accuracy)
    rate, batch = "learning rate of a file (learning_rate)", "tokens of a step (batch_tokens)"
    add("--learning-rate", metavar="COLUMN", help=rate)
    add("--batch", metavar="COLUMN", help=batch)
    objectives = ("huber", "likelihood")
    objective = "sum of Huber losses (huber), or with free scale of the residuals"
    add("--objective", choices=objectives, default="huber", help=objective)
    parse_budget = build_list_parser(lambda text: parse_number(text, False, True))
    budgets = "budgets in FLOPs (1 and 10 times the largest fitted compute)"
    add("--compute", type=parse_budget, default=[], metavar="A,B", help=budgets)
    add("--drop-highest", type=_parse_count, default=0, metavar="N", help="omit N highest losses")
    parse_flops = partial(parse_number, integer=False, positive=True)
    held_out = "fit up to this compute, and compare the other points with their predictions"
    add("--max-flops", type=parse_flops, metavar="FLOPS", help=held_out)
    add("--repeated", action="store_true", help="also fit runs that read data repeatedly")
    samples = "bootstrap samples (1000)"
    add("--samples", type=parse_positive_int, default=1000, metavar="N", help=samples)
    add("--seed", type=_parse_count, default=0, metavar="N", help="seed of the samples (0)")
    predict = "overrides, or an experiment: write the prediction of this run next to its directory"
    add("--predict", metavar="OVERRIDES", help=predict)
    add("--output", type=Path, metavar="DIR", help="directory for figures (SVG, PNG) and CSV files")
    add("--json", action="store_true", help="print all numbers as JSON")
    parser.add_extensions()
    return parser


def _parse_count(text: str) -> int:
    return int(parse_number(text, True, False))


def _run(arguments: argparse.Namespace) -> ExitCode:
    from hlat.study.power_law import Objective
    from hlat.study.scaling_analysis import analyze_points
    from hlat.study.scaling_fit import FitSettings
    from hlat.study.scaling_text import format_analysis, summarize_analysis

    predicted = None if arguments.predict is None else _compose(arguments.predict)
    points, notes = _load_points(arguments)
    settings = FitSettings(Objective(arguments.objective), arguments.samples, arguments.seed)
    analysis = analyze_points(points, settings, arguments.compute, notes, arguments.max_flops)
    lines, summary = format_analysis(analysis), summarize_analysis(analysis)
    if predicted is not None:
        column = arguments.parameters
        more_lines, summary["prediction"] = _register(predicted, analysis.fit, column)
        lines += ["", *more_lines]
    if arguments.output is not None:
        from hlat.report.scaling_figures import write_scaling_figures

        names = write_scaling_figures(analysis, arguments.output)
        lines += ["", f"wrote {', '.join(names)} as SVG, PNG and CSV to {arguments.output}"]
    print(json.dumps(summary, indent=2) if arguments.json else "\n".join(lines))
    return ExitCode.FINISHED


def _load_points(arguments: argparse.Namespace) -> "tuple[ScalingPoints, list[str]]":
    """Return the points, and which were omitted."""
    from hlat.study.scaling_points import load_csv_points
    from hlat.study.scaling_runs import load_run_points

    _validate_source(arguments)
    notes: list[str] = []
    if arguments.data is not None:
        points = load_csv_points(arguments.data, _build_columns(arguments, "loss"))
    else:
        columns = _build_columns(arguments, "heldout_bits_per_byte")
        selection = arguments.where, arguments.repeated
        points, notes = load_run_points(arguments.runs, columns, *selection)
    if arguments.drop_highest:
        points = points.drop_highest(arguments.drop_highest)
        notes.append(f"omitted the {arguments.drop_highest:,} highest losses")
    return points, notes


def _validate_source(arguments: argparse.Namespace) -> None:
    if (arguments.data is None) == (not arguments.runs):
        raise ConfigError("give either roots of runs, such as runs, or data=FILE.csv")
    if arguments.data is not None and (arguments.where is not None or arguments.repeated):
        raise ConfigError("where= and repeated= select runs; remove them, or data=")
    if arguments.data is None and (arguments.learning_rate or arguments.batch):
        raise ConfigError(
            "learning_rate= and batch= name columns of data=FILE.csv; those of runs are "
            "optimizer.lr and the tokens of a step"
        )


def _build_columns(arguments: argparse.Namespace, metric: str) -> "PointColumns":
    from hlat.study.scaling_points import PointColumns

    return PointColumns(
        arguments.parameters,
        arguments.tokens,
        arguments.flops,
        arguments.metric or metric,
        arguments.group,
        arguments.accuracy,
        arguments.learning_rate,
        arguments.batch,
    )


def _compose(text: str) -> "Config":
    """Return the configuration of the predicted run.

    Args:
        text: Overrides, in which a single word is the name of an experiment.
    """
    from hlat.config.compose import compose_config
    from hlat.config.resolve import resolve_config

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"predict={text} has unbalanced quotes ({error})") from error
    overrides = [word if "=" in word else f"experiment={word}" for word in words]
    return resolve_config(compose_config(overrides))


def _register(
    config: "Config", fit: "ScalingFit", parameters: str
) -> tuple[list[str], dict[str, object]]:
    """Write the prediction of a run; return its lines and content."""
    from hlat.study import registered_prediction
    from hlat.study.run_record import is_run_dir
    from hlat.study.scaling_runs import RUN_COLUMNS, build_config_values
    from hlat.study.scaling_text import format_interval
    from hlat.tracking.run_directory import build_run_dir

    values, run_dir = build_config_values(config), build_run_dir(config.run)
    column = parameters if parameters in RUN_COLUMNS else RUN_COLUMNS[0]
    predicted = fit.predict(values[column], values["tokens"])
    content = registered_prediction.build_prediction(
        fit, predicted, column, values["flops"], time.time()
    )
    file = registered_prediction.save_prediction(run_dir, content)
    largest = values["flops"] / float(fit.points.flops.max())
    lines = [
        f"{run_dir}: {values[column]:.4g} parameters, {values['tokens']:.4g} tokens, "
        f"{values['flops']:.4g} FLOPs ({largest:.3g} times the largest fitted compute)",
        f"predicted {fit.points.metric}: {format_interval(predicted.run)}",
        f"registered in {file}",
    ]
    known, warnings = fit.list_warnings(), fit.list_warnings([values["flops"]])
    lines += [f"WARNING: {warning}" for warning in warnings if warning not in known]
    if is_run_dir(run_dir):
        lines.append(f"WARNING: {run_dir} has started; its report flags the prediction")
    return lines, content


if __name__ == "__main__":
    run_and_exit(main)
