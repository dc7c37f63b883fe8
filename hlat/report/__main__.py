"""Write the report of a run, or compare several runs: `hlat report`.

A run writes its report when it ends. This command writes it for a run that was killed or still
trains, and compares the runs of a directory, such as those of a sweep.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config import extensions
from hlat.config.argument_parser import (
    CommandLineParser,
    is_launcher_override,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.study.run_record import RunRecord

_EXAMPLES = """\
examples:
  hlat report runs/tiny                 the report of a run
  hlat report runs/tiny serve=8080      the same page in a browser, while the run trains
  hlat report runs                      a comparison of all runs in runs/
  hlat report runs/hlat_tiny            the graph, scores and runs of a campaign
  hlat report runs/sweeps/beta2 wandb=my-team/hlat      also as a report in W&B
  hlat report tables runs/tiny          the paper's Tables II, IV and V beside the run's scores
  hlat report tables runs/a runs/b      also all scores, and differences paired by item
  hlat report tables runs/a runs/b output=scores.csv      or .md, .html
  hlat report samples runs/a runs/b     prompts and answers of evaluations with log_samples=true

See docs/tracking.md."""
_MAX_PORT = 2**16 - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report, print a summary and the path of the page; return the exit code."""
    parser = CommandLineParser(
        "report",
        "Write report.html and figures/ (SVG, PNG) of a run into its directory. The run may be\n"
        "finished, killed or still training. Of several runs or of a sweep: print a table and\n"
        "write comparison.html and comparison/.",
        _EXAMPLES,
    )
    add = parser.add_argument
    runs = (
        "directory of a run, of a sweep, or of several runs; `tables` first: the paper's tables; "
        "`samples` first: items of evaluated models"
    )
    add("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    output = (
        "directory of a comparison (default: the only RUN, or the directory of the first run); "
        "file of tables"
    )
    add("--output", type=Path, metavar="DIR", help=output)
    serve = "serve the page of one run to this machine's browser (0: any free port)"
    wandb = "save the tables and verdicts of a study as a W&B report in this project"
    add("--wandb", metavar="[ENTITY/]PROJECT", help=wandb)
    add("--serve", type=_parse_port, nargs="?", const=0, metavar="PORT", help=serve)
    parser.add_extensions()
    typed = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse(typed)
    overrides = [str(word) for word in arguments.runs if is_launcher_override(str(word))]
    arguments.runs = [path for path in arguments.runs if str(path) not in overrides]
    if overrides:
        words = [word for word in typed if word not in overrides]
        return run_command(lambda: _submit(arguments.runs, words, overrides), "files of the job")
    code = run_command(lambda: _run(arguments), "the report cannot be written")
    return ExitCode.CONFIGURATION if code == ExitCode.FAILED else code


def _submit(runs: Sequence[Path], words: Sequence[str], overrides: Sequence[str]) -> int:
    """Submit the report of one run or directory as a job."""
    from hlat.config.command_submission import submit_command

    if len(runs) != 1:
        raise ConfigError(f"a job writes the report of one directory, but {len(runs)} are given")
    if not submit_command("report", runs[0], words, overrides):
        raise ConfigError("remove hydra/launcher=local to write the report on this machine")
    return ExitCode.FINISHED


def _run(arguments: argparse.Namespace) -> int:
    directories: list[Path] = arguments.runs
    if directories[0] == Path("tables"):
        lines = _build_score_tables(directories[1:], arguments.output)
    elif directories[0] == Path("samples"):
        lines = [_write_items(directories[1:], arguments.output)]
    elif arguments.serve is not None:
        return _serve(directories, arguments.serve)
    else:
        from hlat.jobs.stage_job import is_campaign_dir
        from hlat.study.run_record import is_run_dir  # drawing is slow to import; --help is not

        first, *others = directories
        is_one_run = not others and (is_run_dir(first) or not first.is_dir())
        if is_one_run and arguments.output is not None:
            raise ConfigError(
                f"output={arguments.output} is for comparisons; the report of one run is written "
                f"to {first}"
            )
        if is_one_run and arguments.wandb is not None:
            raise ConfigError(f"wandb={arguments.wandb} is for studies, and {first} is one run")
        if is_one_run:
            lines = _write_report(first)
        else:
            lines = _compare_runs(directories, arguments.output, arguments.wandb)
        if not others and is_campaign_dir(first):
            from hlat.jobs.campaign_report import write_campaign_report

            lines += ["", *write_campaign_report(first)]
    print("\n".join(lines))
    return ExitCode.FINISHED


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:6]) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text} is not a port; use 0 to {_MAX_PORT}")
    return int(text)


def _serve(directories: Sequence[Path], port: int) -> int:
    from hlat.report.report_server import build_server

    if len(directories) != 1:
        raise ConfigError(f"serve= shows one run, but {len(directories)} directories are given")
    with build_server(directories[0], port) as server:
        host, bound_port, *_ = server.server_address
        print(f"http://{host!s}:{bound_port}/ shows {directories[0]}; stop with Ctrl-C", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return ExitCode.FINISHED


def _build_score_tables(sources: Sequence[Path], output: Path | None) -> list[str]:
    from hlat.evaluate.evaluation_results import format_paper_tables, load_evaluated_models
    from hlat.report import score_tables

    if output is not None and output.suffix not in score_tables.SUFFIXES:
        raise ConfigError(f"output={output} must end in {', '.join(score_tables.SUFFIXES)}")
    models = [model for source in sources for model in load_evaluated_models(source)]
    paper_tables = format_paper_tables(models)
    if not models:
        return paper_tables
    comparison = score_tables.compare_scores(models)
    if output is None:
        return [*paper_tables, "", *score_tables.format_scores(comparison)]
    score_tables.write_tables(comparison, paper_tables, output)
    return [str(output)]


def _write_items(sources: Sequence[Path], output_dir: Path | None) -> str:
    from hlat.evaluate.evaluation_results import load_evaluated_models
    from hlat.report.items_page import write_items_page

    if not sources:
        raise ConfigError(
            "samples needs models; give directories of runs or models, or scores files, such as "
            "runs/x/evaluations/step_00000100.json"
        )
    models = [model for source in sources for model in load_evaluated_models(source)]
    is_directory = len(sources) == 1 and sources[0].is_dir()
    default_dir = sources[0] if is_directory else sources[0].parent
    return str(write_items_page(models, output_dir or default_dir))


def _write_report(run_dir: Path) -> list[str]:
    from hlat.report.goodput_section import format_goodput_summary
    from hlat.report.report_writer import write_report
    from hlat.study.registered_prediction import format_comparison
    from hlat.study.run_record import load_run_record

    record = load_run_record(run_dir)
    _warn_of_missing_extensions([record])
    page = str(write_report(run_dir, record))
    goodput = filter(None, [format_goodput_summary(record.time_ledger)])
    return [*goodput, *format_comparison(record), page]


def _warn_of_missing_extensions(records: "Sequence[RunRecord]") -> None:
    """Print the words with which the report also has the facts of models of extensions."""
    recorded = (record.flat_config.get(extensions.KEY) for record in records)
    for word in dict.fromkeys(map(extensions.find_missing, recorded)):
        if word is not None:
            print(f"hlat: parameters and FLOPs are missing; add {word}", file=sys.stderr)


def _compare_runs(
    directories: Sequence[Path], output_dir: Path | None, project: str | None
) -> list[str]:
    from hlat.report.comparison_writer import write_comparison
    from hlat.study import run_comparison
    from hlat.study.study_result import build_study_result
    from hlat.study.study_tables import build_study_report, format_study
    from hlat.tracking.text_format import format_table

    if output_dir is not None and output_dir.suffix == ".html":
        raise ConfigError(
            f"output={output_dir} is a directory, to which comparison.html and its figures are "
            f"written; use output={output_dir.with_suffix('')}"
        )
    records = run_comparison.load_run_records(directories)
    _warn_of_missing_extensions(records)
    untrained = run_comparison.load_untrained_points(directories)
    lines = format_table(*run_comparison.build_comparison_table(records))
    if common_table := run_comparison.build_common_table(records):
        lines += [
            "\nthe runs have trained different numbers of tokens; after as many as the shortest:",
            *format_table(*common_table),
        ]
    if seed_table := run_comparison.build_seed_table(records):
        lines += ["\nover seeds, mean and 95% interval:", *format_table(*seed_table)]
    result = build_study_result(records, untrained.num_seeds)
    if result:
        lines += format_study(result)
    if untrained.skipped:
        lines += ["\nskipped, because they cannot run:", *untrained.skipped]
    if untrained.stopped:
        lines += ["\nnot trained, because they are worse than the baseline:", *untrained.stopped]
    output = output_dir or _choose_output(directories)
    lines.append(str(write_comparison(records, output, untrained)))
    if project is not None:
        from hlat.tracking.wandb_report import save_report

        if result is None:
            raise ConfigError(f"wandb={project}: the runs are no study, with seeds and a baseline")
        print("\n".join(lines))
        study = build_study_report(result, run_comparison.list_run_dirs(directories))
        entity, _, name = project.rpartition("/")
        lines = [save_report(study, name, entity or None)]
    return lines


def _choose_output(directories: Sequence[Path]) -> Path:
    """Return the only directory, or the one that contains the first run or sweep."""
    from hlat.study.run_record import is_run_dir
    from hlat.tracking.sweep_log import is_sweep_dir

    first, *others = directories
    return first.parent if others and (is_run_dir(first) or is_sweep_dir(first)) else first


if __name__ == "__main__":
    run_and_exit(main)
