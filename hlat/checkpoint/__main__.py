"""Looks after a run's checkpoints: `python -m hlat.checkpoint ls|verify|prune RUN`.

A run saves, verifies and prunes by itself; this is for whoever wants to know what there is, whether
a disk kept it, and what can go.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.arguments import Parser, count, leave
from hlat.config.errors import ConfigError, Exit

if TYPE_CHECKING:
    from hlat.checkpoint.listing import Entry
    from hlat.checkpoint.places import Place

_EXAMPLES = """\
examples:
  python -m hlat.checkpoint ls runs/x                      what there is, at once
  python -m hlat.checkpoint verify runs/x                  read all of it: is it what was written
  python -m hlat.checkpoint verify runs/x --step 200       only that of one step
  python -m hlat.checkpoint prune runs/x keep_last=3       what could go; --yes removes it
  python -m hlat.checkpoint prune runs/x keep_last=3 keep_every_steps=1000 --yes"""

_INTERRUPTED = 130
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m hlat.checkpoint",
        description="List, verify or prune the checkpoints of a run.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("action", choices=("ls", "verify", "prune"), help="what to do")
    add("run", metavar="RUN", help="folder of a run; ls, verify: or a checkpoint, or a URL")
    add(
        "settings",
        nargs="*",
        metavar="SETTING",
        help="prune: keep_last=N and keep_every_steps=M, as under checkpoint in the configuration",
    )
    add("--json", action="store_true", help="ls: print a JSON list")
    add("--step", type=int, metavar="N", help="verify: only checkpoints of this step")
    add("--yes", action="store_true", help="prune: remove, do not just tell")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit code."""
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    keep = parser.settings(arguments.settings, {"keep_last": count, "keep_every_steps": count})
    if problem := _misuse(arguments, keep):
        parser.error(problem)
    try:
        return _do(arguments, keep)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    except OSError as error:
        print(f"{error.filename or arguments.run}: {error.strerror or error}", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED


def _do(arguments: argparse.Namespace, keep: dict[str, int]) -> int:
    from hlat.checkpoint import places

    run = places.at(arguments.run)
    if arguments.action == "ls":
        return _list(run, arguments.json)
    if arguments.action == "verify":
        return _verify(run, arguments.step)
    if not isinstance(run, Path):
        raise ConfigError(f"{run}: prune needs a run's folder, which tells whether it trains")
    return _prune(run, keep, arguments.yes)


def _misuse(arguments: argparse.Namespace, keep: dict[str, int]) -> str | None:
    """What is wrong with the arguments together, if anything is."""
    owners = {"ls": arguments.json, "verify": arguments.step is not None, "prune": arguments.yes}
    flags = {"ls": "--json", "verify": "--step", "prune": "--yes"}
    for action, given in owners.items():
        if given and action != arguments.action:
            return f"only {action} takes {flags[action]}"
    if arguments.action != "prune":
        return "only prune takes keep_last= and keep_every_steps=" if keep else None
    return None if "keep_last" in keep else "how many to keep: give keep_last=N"


def _list(run: "Place", as_json: bool) -> int:
    from hlat.checkpoint import listing

    entries = listing.entries(run)
    if as_json:
        told = [vars(entry) | {"path": str(entry.path)} for entry in entries]
        print(json.dumps(told, indent=1))
        return Exit.FINISHED
    header = ("step", "tokens", "written", "age", "size", "kind", "state", "")
    rows = [header, *(_row(entry, run) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, (True, True, False, True, True, False, False, False), strict=True)
        print("  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip())
    return Exit.FINISHED


def _row(entry: "Entry", run: "Place") -> tuple[str, ...]:
    from hlat.data.preparation.progress import format_bytes

    return (
        "?" if entry.step is None else str(entry.step),
        "?" if entry.tokens is None else f"{entry.tokens:,}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.written)),
        _age(time.time() - entry.written),
        format_bytes(entry.num_bytes),
        entry.kind or "?",
        entry.state,
        _name(entry.path, run),
    )


def _age(seconds: float) -> str:
    """The largest unit that fits, such as `3 h`."""
    size, unit = next((u for u in _AGES if seconds >= u[0]), _AGES[-1])
    return f"{max(0, int(seconds // size))} {unit}"


def _name(path: "Place", run: "Place") -> str:
    """A folder as seen from the run; anybody may have named it."""
    name = str(path).removeprefix(f"{run}/")
    return name if name.isprintable() else repr(name)


def _verify(run: "Place", step: int | None) -> int:
    """Read checkpoints in full; those that are being written or were set aside are no promise."""
    from hlat.checkpoint import listing, lookup, store
    from hlat.checkpoint.errors import CorruptCheckpointError
    from hlat.data.preparation.progress import Progress, tell

    entries = [e for e in listing.entries(run) if e.path == run or listing.is_promised(e.path)]
    if not entries:
        raise lookup.nothing_in(run)
    chosen = [entry for entry in entries if step in (None, entry.step)]
    if not chosen:
        there = ", ".join(str(entry.step) for entry in entries)
        raise ConfigError(f"--step={step}: {run} has no such checkpoint, only {there}")
    num_wrong = 0
    with closing(Progress("verifying", sum(entry.num_bytes for entry in chosen))) as progress:
        for entry in chosen:
            try:
                store.verify(entry.path, progress.add)
                tell(f"{_name(entry.path, run)}: ok")
            except CorruptCheckpointError as error:
                num_wrong += 1
                tell(f"{_name(entry.path, run)}: {error}")
    return Exit.FAILED if num_wrong else Exit.FINISHED


def _prune(run: Path, keep: dict[str, int], sure: bool) -> int:
    from hlat.checkpoint import lookup
    from hlat.tracking import run_folder

    home = lookup.home(run)
    if not (home / "checkpoints").is_dir():
        raise lookup.nothing_in(run)
    if not sure:
        return _show_or_remove(home, keep, sure)
    try:
        lock = run_folder.hold(run)
    except BlockingIOError as error:
        raise ConfigError(
            f"{run}: a run is training there, and prunes by itself; wait until it has ended"
        ) from error
    with lock:
        return _show_or_remove(home, keep, sure)


def _show_or_remove(run: "Place", keep: dict[str, int], sure: bool) -> int:
    from hlat.checkpoint import listing, retention
    from hlat.data.preparation.progress import Progress, format_bytes

    folder, numbers = run / "checkpoints", (keep["keep_last"], keep.get("keep_every_steps"))
    sizes = {entry.path: entry.num_bytes for entry in listing.entries(folder)}
    with closing(Progress("verifying the newest", [*sizes.values()][-1])) as progress:
        newest, refused = retention.newest_valid(folder, progress=progress.add)
    for reason in refused:
        print(f"WARNING: {reason}", file=sys.stderr)
    if newest is None:
        print(f"{run} holds no valid checkpoint, so nothing is removed", file=sys.stderr)
        return Exit.FAILED
    if sure:
        doomed = retention.prune(folder, *numbers, verified=newest)
    else:
        doomed = retention.dispensable(folder, newest, *numbers)
    done = "removed" if sure else "would remove"
    for path in doomed:
        print(f"{done} {_name(path, run)}  {format_bytes(sizes.get(path, 0))}")
    total = format_bytes(sum(sizes.get(path, 0) for path in doomed))
    rest = "" if sure or not doomed else "; this was a dry run: --yes removes them"
    print(f"{done} {len(doomed)} of {len(sizes)}, {total}{rest}")
    return Exit.FINISHED


if __name__ == "__main__":
    leave(main)
