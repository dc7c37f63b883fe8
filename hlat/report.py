"""Make the report of a run, or compare several: `python -m hlat.report FOLDER ...`.

A run writes its report when it ends. This entry makes it for one that was killed or still goes on,
and puts the runs of a folder, such as those of a sweep, beside each other.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hlat.config.arguments import leave
from hlat.config.errors import ConfigError, Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; print what it comes to, and in the last line where it is.

    Args:
        argv: Arguments of the command line; None: those of this process.

    Returns:
        0, or 2 if a folder has no run or cannot be written to.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["tables"]:
        return _tables(words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m hlat.report",
        description="Write report.html and figures/ (SVG, PNG) of a run into its folder, from its"
        " metrics.jsonl, events.jsonl, config.yaml and provenance.json. The run may be finished,"
        " killed or still going on. Of several runs, a sweep, or the runs in a folder: print a"
        " table, and write comparison.html and comparison/.",
        epilog="examples: python -m hlat.report runs/tiny; python -m hlat.report runs; python -m"
        " hlat.report tables runs/tiny (the paper's Tables II, IV and V, with the scores that"
        " hlat.evaluate has found)",
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="folder of a run, such as runs/<run.name>, of a sweep, or one that holds runs",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where a comparison is written (default: the only folder, or here)",
    )
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="show the page of one run to this machine's browser, made anew at each look",
    )
    given = parser.parse_args(words)
    from hlat.reporting.record import is_run  # drawing is slow to import; --help is not

    try:
        if given.serve is not None:
            return _serve(given.folders, given.serve)
        if len(given.folders) == 1 and (is_run(given.folders[0]) or not given.folders[0].is_dir()):
            told = _report(given.folders[0])
        else:
            told = _compare(given.folders, given.output)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    print("\n".join(filter(None, told)))
    return Exit.FINISHED


def _tables(words: Sequence[str]) -> int:
    """Print the paper's tables, with rows of the user's own."""
    parser = argparse.ArgumentParser(
        prog="python -m hlat.report tables",
        description="Print Tables II, IV and V of the HLAT paper, with the scores that"
        " python -m hlat.evaluate has found of runs and models.",
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="*",
        metavar="FOLDER",
        help="folder of a run or a model that was evaluated (default: the paper's rows alone)",
    )
    from hlat.evaluation.tables import lines

    try:
        print("\n".join(lines(parser.parse_args(words).folders)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    return Exit.FINISHED


def _serve(folders: Sequence[Path], port: int) -> int:
    from hlat.reporting.server import server

    if len(folders) != 1:
        raise ConfigError(f"--serve shows one run, and {len(folders)} folders are given")
    with server(folders[0], port) as serving:
        host, bound, *_ = serving.server_address
        print(f"http://{host!s}:{bound}/ shows {folders[0]}; Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            serving.serve_forever()
    return Exit.FINISHED


def _report(folder: Path) -> list[str]:
    from hlat.reporting.lifetime import sentence
    from hlat.reporting.record import read
    from hlat.reporting.report import write

    record = read(folder)
    page = write(record, folder)
    return [sentence(record.lifetime), str(page)]


def _compare(folders: Sequence[Path], output: Path | None) -> list[str]:
    from hlat.reporting import comparison, seeds
    from hlat.reporting.report import compare
    from hlat.reporting.wording import columns

    records, left_out = comparison.runs(folders), comparison.left_out(folders)
    told = columns(*comparison.table(records))
    if over_seeds := seeds.table(records):
        told += ["\nover seeds, mean ± standard deviation:", *columns(*over_seeds)]
    if left_out:
        told += ["\nleft out, as it cannot run:", *left_out]
    place = output or (folders[0] if len(folders) == 1 else Path())
    return [*told, str(compare(records, place, left_out))]


if __name__ == "__main__":
    leave(main)
