"""Write the report of a run, or compare several runs: `hlat report`.

A run writes its report when it ends. This command writes it for a run that was killed or still
trains, and compares the runs of a directory, such as those of a sweep.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hlat.config.argument_parser import CommandLineParser, run_and_exit, run_command
from hlat.config.config_errors import ConfigError, ExitCode

_EXAMPLES = """\
examples:
  hlat report runs/tiny                 the report of a run
  hlat report runs/tiny serve=8080      the same page in a browser, while the run trains
  hlat report runs                      a comparison of all runs in runs/
  hlat report tables runs/tiny          the paper's Tables II, IV and V beside the run's scores

See docs/tracking.md."""


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
    runs = "directory of a run, of a sweep, or of several runs; `tables` first: the paper's tables"
    add("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    output = "directory of a comparison (default: the only RUN, or the working directory)"
    add("--output", type=Path, metavar="DIR", help=output)
    serve = "serve the page of one run to this machine's browser (0: any free port)"
    add("--serve", type=int, nargs="?", const=0, metavar="PORT", help=serve)
    arguments = parser.parse(argv)

    def run() -> int:
        if arguments.runs[0] == Path("tables"):
            return _print_paper_tables(arguments.runs[1:])
        if arguments.serve is not None:
            return _serve(arguments.runs, arguments.serve)
        return _report(arguments.runs, arguments.output)

    code = run_command(run, "the report cannot be written")
    return ExitCode.CONFIGURATION if code == ExitCode.FAILED else code


def _report(directories: Sequence[Path], output_dir: Path | None) -> int:
    from hlat.report.run_record import is_run_dir  # drawing is slow to import; --help is not

    is_one_run = len(directories) == 1 and (
        is_run_dir(directories[0]) or not directories[0].is_dir()
    )
    lines = _write_report(directories[0]) if is_one_run else _compare_runs(directories, output_dir)
    print("\n".join(filter(None, lines)))
    return ExitCode.FINISHED


def _print_paper_tables(directories: list[Path]) -> int:
    """Print the paper's tables, with the scores of the user's models below."""
    from hlat.evaluate.paper_tables import format_tables

    print("\n".join(format_tables(directories)))
    return ExitCode.FINISHED


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


def _write_report(run_dir: Path) -> list[str]:
    from hlat.report.goodput_tables import format_goodput_summary
    from hlat.report.report_writer import write_report
    from hlat.report.run_record import load_run_record

    record = load_run_record(run_dir)
    return [format_goodput_summary(record.time_ledger), str(write_report(run_dir, record))]


def _compare_runs(directories: Sequence[Path], output_dir: Path | None) -> list[str]:
    from hlat.report import run_comparison
    from hlat.report.report_writer import write_comparison
    from hlat.report.text_format import format_table

    records = run_comparison.load_run_records(directories)
    skipped = run_comparison.list_skipped_points(directories)
    lines = format_table(*run_comparison.build_comparison_table(records))
    if seed_table := run_comparison.build_seed_table(records):
        lines += ["\nover seeds, mean ± standard deviation:", *format_table(*seed_table)]
    if skipped:
        lines += ["\nskipped, because they cannot run:", *skipped]
    output = output_dir or (directories[0] if len(directories) == 1 else Path())
    return [*lines, str(write_comparison(records, output, skipped))]


if __name__ == "__main__":
    run_and_exit(main)
