"""Lists, follows, cancels and sends again what was sent to Slurm: `python -m hlat.jobs`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hlat.config.arguments import Parser, leave
from hlat.config.errors import ConfigError, Exit
from hlat.jobs import slurm
from hlat.jobs.listing import Row, rows, table
from hlat.jobs.submission import Place, runs

_EXAMPLES = """\
examples:
  python -m hlat.jobs                           the jobs of all runs in runs/
  python -m hlat.jobs runs/sweeps/2026-11-22_09-30-00    those of a sweep
  python -m hlat.jobs logs --follow runs/hlat_7b
  python -m hlat.jobs cancel runs/hlat_7b
  python -m hlat.jobs resubmit --failed runs    what ended before it was complete, once more
  python -m hlat.jobs runs/hlat_7b/evaluations  what evaluates it

A folder is that of a run, of several runs with their evaluations, or of a sweep.
docs/launchers.md tells more."""
_ACTIONS = ("list", "logs", "cancel", "resubmit")
_SECONDS_BETWEEN_LOOKS = 1.0
_INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    """Do what the words say; return the exit code."""
    given = list(words)
    action = given.pop(0) if given and given[0] in _ACTIONS else "list"
    parser = Parser(
        prog="python -m hlat.jobs",
        usage="%(prog)s [list | logs [--follow] | cancel | resubmit [--failed]] [FOLDER...]",
        description="List what was sent to Slurm, show its logs, cancel it, or send it again.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", default=[Path("runs")])
    if action == "logs":
        parser.add_argument("--follow", action="store_true", help="until the job has ended")
    if action == "resubmit":
        parser.add_argument("--failed", action="store_true", help="only what is not complete")
    arguments = parser.parse_args(given)
    try:
        found = rows([run for folder in arguments.folders for run in runs(folder)])
        if not found:
            raise ConfigError(f"nothing was sent from {', '.join(map(str, arguments.folders))}")
        if action == "logs":
            return _logs(found, arguments.follow)
        if action == "cancel":
            return _cancel([row for row in found if row.jobs])
        if action == "resubmit":
            return _resubmit([row for row in found if row.failed or not arguments.failed])
        print(table(found))
    except ConfigError as error:
        print(f"hlat: {error}", file=sys.stderr)
        return Exit.CONFIGURATION
    except KeyboardInterrupt:
        return _INTERRUPTED
    return Exit.FINISHED


def _cancel(alive: list[Row]) -> int:
    if alive:
        slurm.cancel([job for row in alive for job in row.jobs])
    for row in alive:
        print(f"job {' and '.join(row.jobs)} of {row.place.run_folder} is cancelled")
    if not alive:
        print("no job waits or runs")
    return Exit.FINISHED


def _resubmit(chosen: list[Row]) -> int:
    """Send the same files again; nothing is sent while any of the jobs is alive."""
    if alive := [row for row in chosen if row.jobs]:
        raise ConfigError(
            *(f"job {row.jobs[-1]} of {row.place.run_folder} is alive" for row in alive)
        )
    for row in chosen:
        first = None
        if row.before is not None and not row.before.complete:
            first = _send(row.before.place, None)
        job = _send(row.place, first)
        after = "" if first is None else f", after job {first} has compiled it"
        print(f"job {job} {row.does} {row.place.run_folder}{after}")
    if not chosen:
        print("nothing has failed")
    return Exit.FINISHED


def _send(place: Place, after: str | None) -> str:
    job = slurm.submit(place.script, after)
    place.receipts.append({"job": job, "time": time.time()})
    return job


def _logs(found: list[Row], follow: bool) -> int:
    """Print what jobs have said; of several, which one is a line before."""
    if follow and len(found) > 1:
        raise ConfigError(f"{len(found)} runs cannot be followed at once; name the folder of one")
    for row in found:
        if len(found) > 1:
            print(f"==> {row.place.run_folder} <==")
        shown = {log: _print(log, 0) for log in _logs_of(row)}
    while follow:
        ended = not rows([found[0].place.run_folder])[0].jobs
        shown = {log: _print(log, since) for log, since in shown.items()}
        if ended:
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return Exit.FINISHED


def _logs_of(row: Row) -> list[Path]:
    """Of the job that comes before, and of the run's."""
    before = [] if row.before is None else [row.before.place.log(row.before.job)]
    return [*before, row.place.log(row.job)]


def _print(log: Path, since: int) -> int:
    """Print a log from some byte on; return how far it was printed."""
    if not log.exists():
        return since
    with log.open("rb") as file:
        file.seek(since)
        text = file.read()
    print(text.decode(errors="replace"), end="", flush=True)
    return since + len(text)


if __name__ == "__main__":
    leave(lambda: main(sys.argv[1:]))
