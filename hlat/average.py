"""Averages the weights of a run's checkpoints: `python -m hlat.average`.

    run -> checkpoints (verified, of one model) -> mean -> a checkpoint of weights

HLAT-70B was evaluated on the mean of its last two checkpoints (HLAT paper, sections IV-C and V-D).
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.arguments import Parser, count, leave
from hlat.config.errors import ConfigError, Exit
from hlat.config.precision import Dtype

if TYPE_CHECKING:
    from hlat.checkpoint.average import Part
    from hlat.checkpoint.places import Place

_EXAMPLES = """\
examples:
  python -m hlat.average runs/x last=2                       the newest two checkpoints
  python -m hlat.average runs/x steps=200,400,600            these three
  python -m hlat.average runs/x steps=200,400 weights=1,3    the second counts three times
  python -m hlat.average runs/x last=2 --output mean --dtype bf16

Then: python -m hlat.export AVERAGE --output DIR. docs/averaging.md tells more."""

_INTERRUPTED = 130
_LARGEST_WEIGHT = 1e6


def _parser() -> Parser:
    parser = Parser(
        prog="python -m hlat.average",
        usage="%(prog)s RUN last=N|steps=A,B,... [weights=X,Y,...] [--output DIR] [--dtype DTYPE]",
        description="Write the mean of the weights of a run's checkpoints as a checkpoint of\n"
        "weights. All are read in full first, and a damaged one is refused.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder or URL of a run")
    add(
        "settings",
        nargs="*",
        metavar="SETTING",
        help="last=N: the newest N; steps=A,B: these; weights=X,Y: how much each counts",
    )
    add("--output", type=Path, metavar="DIR", help="folder to write (default: in RUN/averages)")
    kinds = [dtype.value for dtype in Dtype]
    add("--dtype", choices=kinds, help="dtype to write (default: that of the stored weights)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the average and print how to use it; return the exit code."""
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    known = {"last": count, "steps": _list(count), "weights": _list(_weight)}
    settings = parser.settings(arguments.settings, known)
    if problem := _misuse(settings):
        parser.error(problem)
    try:
        _average(arguments, settings)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    except OSError as error:
        place = arguments.output or f"{arguments.run}/averages"
        print(f"{place} cannot be written ({error.strerror or error})", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; nothing of the average is left", file=sys.stderr)
        return _INTERRUPTED
    return Exit.FINISHED


def _misuse(settings: dict[str, Any]) -> str | None:
    """What is wrong with the settings together, if anything is."""
    if ("last" in settings) == ("steps" in settings):
        return "which checkpoints: give either last=N or steps=A,B"
    steps = settings.get("steps")
    number = settings["last"] if steps is None else len(steps)
    if number < 2:
        return "an average is of two checkpoints or more"
    if steps is not None and len(set(steps)) < number:
        return f"steps={','.join(map(str, steps))} names a step twice; give it a weight instead"
    weights = settings.get("weights", [1.0] * number)
    if len(weights) != number:
        return f"weights= has {len(weights)} numbers for {number} checkpoints; give one for each"
    return None


def _average(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    from hlat.checkpoint import average, new_folder, places
    from hlat.data.preparation.progress import Progress

    steps, last = settings.get("steps"), settings.get("last")
    run = places.at(arguments.run)
    paths = average.choose(run, steps, last)
    weights = settings.get("weights", [1.0] * len(paths))
    if steps is not None:  # weights stand in the order in which the steps were typed
        weights = [weight for _, weight in sorted(zip(steps, weights, strict=True))]
    if arguments.output is not None:
        new_folder.refuse_existing(arguments.output)
    dtype = None if arguments.dtype is None else Dtype(arguments.dtype)
    parts = _read(paths, weights)
    average.refuse_strangers(parts, dtype)
    output = arguments.output or average.default_output(run, parts, dtype)
    new_folder.refuse_existing(output)
    with closing(Progress("averaging", average.size(parts, dtype))) as progress:
        average.write(output, parts, dtype, progress.add)
    for part in parts:
        print(f"{part.path}  weight {part.weight:g}")
    print(f"averaged to {output}")
    print(f"export it:  python -m hlat.export {output} --output DIR")


def _read(paths: "Sequence[Place]", weights: Sequence[float]) -> "list[Part]":
    from hlat.checkpoint import average
    from hlat.data.preparation.progress import Progress

    with closing(Progress("verifying", average.num_bytes(paths))) as progress:
        return [
            average.read(path, weight, progress.add)
            for path, weight in zip(paths, weights, strict=True)
        ]


def _list(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """What reads a list of items with commas between."""
    return lambda text: [item(word) for word in text.split(",")]


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= _LARGEST_WEIGHT:
        raise ValueError(f"needs numbers above zero, of {_LARGEST_WEIGHT:g} or less")
    return weight


if __name__ == "__main__":
    leave(main)
