"""List, filter, group, compare and export the runs below a root: `hlat runs`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import (
    CommandLineParser,
    build_list_parser,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.run_index import index_file

_EXAMPLES = """\
Columns are those of the list, `config.KEY` for a setting, `code`, `data`, `host`, `tokens`,
`best_loss`, `cost_usd`, `spikes`, `heldout_bits_per_byte.SOURCE` and others: columns=x lists them.

examples:
  hlat runs                                                     all runs in runs/
  hlat runs /shared/runs where="config.optimizer.beta2=0.99 and step>=500"
  hlat runs where="state!=finish" columns=host,config.run.seed
  hlat runs group=config.optimizer.lr,config.precision.name     mean and 95% interval of each group
  hlat runs compare=a,b                                         settings, code and data that differ
  hlat runs export=runs.parquet

See docs/studies.md."""
_FILE_SUFFIXES = (".csv", ".parquet")


def main(argv: Sequence[str] | None = None) -> int:
    """Print or export the runs; return the exit code."""
    parser = CommandLineParser(
        "runs",
        "List, filter, group, compare and export the runs below a root. An index in the root\n"
        "makes this fast; it is rebuilt when it is missing or damaged.",
        _EXAMPLES,
    )
    add, parse_names = parser.add_argument, build_list_parser(str)
    add("root", nargs="?", type=Path, default=Path("runs"), metavar="ROOT", help="root (runs)")
    add("--where", metavar="EXPRESSION", help="comparisons of columns, with and, or, not")
    add("--columns", type=parse_names, default=[], metavar="A,B", help="further columns")
    add("--group", type=parse_names, metavar="A,B", help="summarize the runs with equal columns")
    add("--compare", type=parse_names, metavar="A,B", help="print what differs between runs")
    add("--export", type=_parse_export_path, metavar="FILE", help="write csv or parquet")
    add("--rebuild", action="store_true", help="read all runs again")
    arguments = parser.parse(argv)
    return run_command(lambda: _run(arguments), "the runs cannot be read")


def _run(arguments: argparse.Namespace) -> ExitCode:
    from hlat.report.text_format import format_table
    from hlat.run_index import index_file, run_filter, run_table

    runs = index_file.load_run_list(arguments.root, arguments.rebuild)
    if arguments.where is not None:
        runs = run_filter.filter_runs(runs, arguments.where)
    if arguments.export is not None:
        run_table.export_runs(runs, arguments.export)
        print(f"wrote {len(runs.rows):,} runs to {arguments.export}")
        return ExitCode.FINISHED
    if arguments.compare is not None:
        headers, rows = run_table.format_differences(_select_names(runs, arguments.compare))
    elif arguments.group is not None:
        headers, rows = run_table.format_groups(runs, arguments.group)
    else:
        headers, rows = run_table.format_run_list(runs, arguments.columns)
    print("\n".join(format_table(headers, rows)))
    if arguments.compare is None and arguments.group is None:
        print(f"{len(runs.rows):,} runs in {arguments.root}")
    return ExitCode.FINISHED


def _select_names(runs: "index_file.RunList", names: Sequence[str]) -> "index_file.RunList":
    """Return the runs with these names, in order; raise ConfigError if one does not exist."""
    by_name = {row["run"]: i for i, row in enumerate(runs.rows)}
    if missing := [name for name in names if name not in by_name]:
        raise ConfigError(f"compare={','.join(names)}: {runs.root} has no run {missing[0]}")
    if len(names) < 2:
        raise ConfigError(f"compare={','.join(names)}: give at least two runs")
    return runs.select([by_name[name] for name in names])


def _parse_export_path(text: str) -> Path:
    if Path(text).suffix not in _FILE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text} must end in {' or '.join(_FILE_SUFFIXES)}")
    return Path(text)


if __name__ == "__main__":
    run_and_exit(main)
