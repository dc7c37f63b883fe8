"""Fit regressions of held-out losses on mixtures, and propose a mixture: `hlat mixture`."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import (
    CommandLineParser,
    parse_number,
    parse_positive_int,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.study.mixture_analysis import MixtureAnalysis
    from hlat.study.mixture_points import MixturePoints

_FORMS = ("linear", "log_linear", "lightgbm")
_EXAMPLES = """\
The held-out losses of a run are its bits per byte by source. With data=, the first columns of both
files are the names of the points, and the base is the mean mixture.

examples:
  hlat mixture runs where="tracking.wandb.group=mixture"     the runs of +sweep=mixture
  hlat mixture runs/phases                                   weights and start of a last phase
  hlat mixture runs output=mixture                           page, figure, and proposal as a phase
  hlat mixture runs target=code:2,prose:1 max_epochs=2       another mean, fewer repetitions
  hlat mixture runs tokens=20e9                              limit the epochs of a longer run
  hlat mixture data=weights.csv losses=losses.csv            points of others

See docs/scaling.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the regressions and the proposal; return the exit code."""
    arguments = _build_parser().parse(list(sys.argv[1:] if argv is None else argv))
    return run_command(lambda: _run(arguments), "the proposal cannot be written")


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "mixture",
        "Fit regressions of the held-out losses of finished runs on the weights of their sources,\n"
        "with cross-validated errors, and propose the weights with the lowest predicted loss, for\n"
        "the whole run or, with a start, for its last phase.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUNS", help="roots of runs, or runs")
    add("--data", type=Path, metavar="FILE", help="CSV file of weights, instead of runs")
    add("--losses", type=Path, metavar="FILE", help="CSV file of the losses of the same points")
    add("--where", metavar="EXPRESSION", help="filter of the runs, as in hlat runs")
    target = "weights of the held-out sets in the mean to minimize (equal weights)"
    add("--target", type=_parse_weights, default={}, metavar="NAME:W,..", help=target)
    form = "form of the proposal (that with the lowest cross-validated error)"
    add("--form", choices=_FORMS, help=form)
    epochs = "largest number of passes over a source (4)"
    parse_positive = _parse_positive
    add("--max-epochs", type=parse_positive, default=4.0, metavar="X", help=epochs)
    tokens = "tokens of the run for which the passes are limited (those of the runs)"
    add("--tokens", type=parse_positive, metavar="N", help=tokens)
    samples = "bootstrap samples of the gain (200)"
    add("--samples", type=parse_positive_int, default=200, metavar="N", help=samples)
    add("--seed", type=_parse_count, default=0, metavar="N", help="seed of the samples (0)")
    add("--output", type=Path, metavar="DIR", help="directory for page, figure, CSV and proposal")
    add("--json", action="store_true", help="print all numbers as JSON")
    parser.add_extensions()
    return parser


def _parse_positive(text: str) -> float:
    return parse_number(text, False, True)


def _parse_count(text: str) -> int:
    return int(parse_number(text, True, False))


def _parse_weights(text: str) -> dict[str, float]:
    """Return the weights of `NAME:WEIGHT,...`, or raise argparse.ArgumentTypeError."""
    weights = {}
    for item in text.split(","):
        name, colon, value = item.rpartition(":")
        if not colon or not name:
            raise argparse.ArgumentTypeError(f"{item} is not a name with a weight, such as code:2")
        weights[name] = parse_number(value, False, False)
    return weights


def _run(arguments: argparse.Namespace) -> ExitCode:
    from hlat.study.mixture_analysis import MixtureSettings, analyze_mixtures
    from hlat.study.mixture_regression import MixtureForm
    from hlat.study.mixture_text import format_mixtures, summarize_mixtures

    points, notes = _load_points(arguments)
    settings = MixtureSettings(
        arguments.target,
        None if arguments.form is None else MixtureForm(arguments.form),
        arguments.max_epochs,
        arguments.tokens,
        arguments.samples,
        arguments.seed,
    )
    analysis = analyze_mixtures(points, settings, notes)
    lines, summary = format_mixtures(analysis), summarize_mixtures(analysis)
    if arguments.output is not None:
        lines += ["", *_write(analysis, arguments.output, from_runs=arguments.data is None)]
    print(json.dumps(summary, indent=2) if arguments.json else "\n".join(lines))
    return ExitCode.FINISHED


def _load_points(arguments: argparse.Namespace) -> "tuple[MixturePoints, list[str]]":
    """Return the points, and which runs were omitted."""
    from hlat.study.mixture_points import load_csv_mixtures
    from hlat.study.mixture_runs import load_run_mixtures

    if (arguments.data is None) == (not arguments.runs):
        raise ConfigError("give either roots of runs, such as runs, or data=FILE.csv")
    if (arguments.data is None) != (arguments.losses is None):
        raise ConfigError("data= and losses= are two files of the same points; give both")
    if arguments.data is None:
        return load_run_mixtures(arguments.runs, arguments.where)
    if arguments.where is not None:
        raise ConfigError("where= selects runs; remove it, or data=")
    return load_csv_mixtures(arguments.data, arguments.losses), []


def _write(analysis: "MixtureAnalysis", output_dir: Path, from_runs: bool) -> list[str]:
    """Write page, figure and proposal; return the lines that name them and the next command."""
    from hlat.report.mixture_figures import write_mixture_page
    from hlat.study.mixture_phase import build_comparison_command, write_proposal

    names = write_mixture_page(analysis, output_dir)
    file = write_proposal(analysis, output_dir)
    lines = [f"wrote {', '.join(names)} to {output_dir}", f"wrote the proposal to {file}"]
    if not from_runs or math.isnan(analysis.proposal.gain.value):
        return lines
    command = build_comparison_command(analysis, output_dir)
    return [
        *lines,
        "train the proposal and the base with new seeds, to a verdict:",
        shlex.join(command),
    ]


if __name__ == "__main__":
    run_and_exit(main)
