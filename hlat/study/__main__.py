"""List, filter, group, compare and export the runs below a root: `hlat runs`."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import (
    CommandLineParser,
    build_list_parser,
    parse_file_name,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.study import index_file

_EXAMPLES = """\
Columns are those of the list, settings such as `optimizer.lr` and `precision`, and `tokens`,
`best_loss`, `cost_usd`, `spikes`, `heldout_bits_per_byte.SOURCE`, `code`, `data`, `host`, `ended`.
A setting with the name of a result, such as `data`, is `config.data.name`.

examples:
  hlat runs                                               all runs in runs/
  hlat runs /shared/runs where="optimizer.beta2=0.99 and step>=500"
  hlat runs where="state!=finish" columns=host,run.seed
  hlat runs group=optimizer.lr,precision                  mean and 95% interval of each group
  hlat runs group=optimizer.lr columns=best_loss          also of other results
  hlat runs compare=a,b                                   settings, code and data that differ
  hlat runs compare=optimizer.lr where="precision=mixed"  values of a setting, paired by seed
  hlat runs export=runs.parquet

See docs/studies.md."""


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
    add("--columns", type=parse_names, default=[], metavar="A,B", help="further columns or results")
    add("--group", type=parse_names, metavar="A,B", help="summarize the runs with equal columns")
    compare = "what differs between runs; of one setting: its values, paired by seed"
    add("--compare", type=parse_names, metavar="A,B", help=compare)
    parse_name = partial(parse_file_name, suffixes=(".csv", ".parquet"))
    add("--export", type=parse_name, metavar="FILE", help="write csv or parquet")
    add("--rebuild", action="store_true", help="read all runs again")
    arguments = parser.parse(argv)
    return run_command(lambda: _run(arguments), "the runs cannot be read")


def _run(arguments: argparse.Namespace) -> ExitCode:
    from hlat.study import index_file, run_filter, run_table
    from hlat.tracking.text_format import format_table

    all_runs = runs = index_file.load_run_list(arguments.root, arguments.rebuild)
    if arguments.where is not None:
        runs = run_filter.filter_runs(runs, arguments.where)
        if all_runs.rows and not runs.rows:
            for line in run_filter.format_known_values(all_runs, arguments.where):
                print(line, file=sys.stderr)
    if arguments.export is not None:
        run_table.export_runs(runs, arguments.export)
        print(f"wrote {len(runs.rows):,} runs to {arguments.export}")
        return ExitCode.FINISHED
    if arguments.compare is not None:
        print("\n".join(_compare(runs, arguments.compare)))
        return ExitCode.FINISHED
    if arguments.group is not None:
        table = run_table.format_groups(runs, arguments.group, arguments.columns)
    else:
        table = run_table.format_run_list(runs, arguments.columns)
    print("\n".join(format_table(*table)))
    if arguments.group is None:
        total = "" if arguments.where is None else f"of {len(all_runs.rows):,} "
        print(f"{len(runs.rows):,} {total}runs in {arguments.root}")
    return ExitCode.FINISHED


def _compare(runs: "index_file.RunList", names: Sequence[str]) -> list[str]:
    """Return what differs between runs, or the comparison of the values of a setting."""
    from hlat.study import factor_comparison, index_file, run_row, run_table
    from hlat.study.study_tables import build_effect_table
    from hlat.tracking.text_format import format_table

    if len(names) > 1 or any(row["run"] == names[0] for row in runs.rows):
        return format_table(*run_table.format_differences(_select_names(runs, names)))
    (column,) = index_file.resolve_columns(runs, names)
    if not column.startswith(run_row.CONFIG_PREFIX):
        raise ConfigError(f"compare={column} is a result; give a setting or at least two runs")
    result = factor_comparison.compare_factor(runs, column.removeprefix(run_row.CONFIG_PREFIX))
    warnings = [f"WARNING: {result.text_problem}"] if result.text_problem else []
    title = f"{result.metric_label}; paired by seed"
    return [*warnings, title, *format_table(*build_effect_table(result.comparisons, result.design))]


def _select_names(runs: "index_file.RunList", names: Sequence[str]) -> "index_file.RunList":
    """Return the runs with these names, in order; raise ConfigError if one does not exist."""
    by_name = {row["run"]: i for i, row in enumerate(runs.rows)}
    if missing := [name for name in names if name not in by_name]:
        near = difflib.get_close_matches(missing[0], by_name, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"compare={','.join(names)}: {runs.root} has no run {missing[0]}{hint}")
    if len(names) < 2:
        raise ConfigError(f"compare={','.join(names)}: give at least two runs")
    return runs.select([by_name[name] for name in names])


if __name__ == "__main__":
    run_and_exit(main)
