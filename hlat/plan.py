"""What to expect before a node is booked: `python -m hlat.plan failures`.

The first word says what is planned; each has a function of its own in `_COMMANDS`.
"""

import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.arguments import Parser, number
from hlat.config.errors import ConfigError, Exit

if TYPE_CHECKING:
    from hlat.planning.failures import Scenario

_HELP = """\
usage: python -m hlat.plan COMMAND ...

What to expect, before a node is booked.

commands:
  failures   uptime, goodput and the best checkpoint interval, by formula and by simulation

`python -m hlat.plan COMMAND --help` tells more."""

_FAILURES = """\
keys (times in seconds, those of the scenario unless given):
  scenario        automatic: HLAT-7B with automatic recovery; manual: the paper's run without
  nodes           that must all work
  mtbf_h          hours between failures of one node, on average
  detect_s        until a failure is noticed
  response_s      until the restart begins, on average (log-normal)
  restart_s       until processes have started; failures meanwhile count
  load_s          until they have read the checkpoint; failures meanwhile count
  save_stall_s    for which a save stops training
  save_write_s    from there until the checkpoint would survive a failure
  step_s          a step of training
  every_steps     steps between saves
  steps           of the run, rounded up to whole intervals
  trials, seed    of the simulation (1000, 0)

examples:
  python -m hlat.plan failures
  python -m hlat.plan failures scenario=manual every_steps=300
  python -m hlat.plan failures nodes=256 save_stall_s=2 save_write_s=60 --figure goodput.svg

docs/failures.md tells the formulas and where the numbers come from."""

_INTERRUPTED = 130
_MAY_BE_ZERO = {
    *("detect_s", "response_s", "restart_s", "load_s", "save_stall_s", "save_write_s", "seed")
}

_DEFAULTS = {"scenario": "automatic", "trials": 1000, "seed": 0}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return the exit code."""
    command, *words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP)
        return Exit.FINISHED
    try:
        if command not in _COMMANDS:
            near = difflib.get_close_matches(command, _COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
            raise ConfigError(f"{command} cannot be planned; {hint}")
        return _COMMANDS[command](words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED


def _failures(words: Sequence[str]) -> int:
    """Plan for failures."""
    parser = Parser(
        prog="python -m hlat.plan failures",
        description="What failures cost a run, and how often it should save.",
        epilog=_FAILURES,
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="KEY=VALUE", help="what differs from the scenario")
    add("--json", action="store_true", help="print all numbers as JSON")
    add("--figure", type=Path, metavar="FILE", help="draw goodput over the interval (svg or png)")
    arguments = parser.parse_intermixed_args(words)
    from hlat.planning import failures
    from hlat.reporting import failure_figure
    from hlat.reporting.failures import summarise, table

    file = arguments.figure
    if file is not None and file.suffix not in failure_figure.ENDINGS:
        raise ConfigError(f"--figure {file} must end in {' or '.join(failure_figure.ENDINGS)}")
    scenario, sources, trials, seed = _scenario(parser, arguments.settings)
    failures.refuse_impossible(scenario, trials)
    plan = summarise(scenario, failures.simulate(scenario, trials, seed), sources)
    print(json.dumps(plan, indent=2) if arguments.json else "\n".join(table(plan)))
    if file is not None:
        try:
            failure_figure.write(file, failure_figure.sweep(scenario, trials, seed))
        except OSError as error:
            print(f"--figure {file} cannot be written ({error.strerror})", file=sys.stderr)
            return Exit.FAILED
        print(f"drew {file}", file=sys.stderr)
    return Exit.FINISHED


def _scenario(parser: Parser, words: Sequence[str]) -> "tuple[Scenario, dict[str, str], int, int]":
    """The scenario that the words describe, where its numbers come from, trials and seed."""
    from hlat.planning.failures import Scenario
    from hlat.planning.scenarios import compose

    names = [field.name for field in fields(Scenario)] + ["trials", "seed"]
    whole = {field.name for field in fields(Scenario) if field.type is int} | {"trials", "seed"}
    known: dict[str, Callable[[str], Any]] = {
        name: partial(number, whole=name in whole, positive=name not in _MAY_BE_ZERO)
        for name in names
    }
    given = parser.settings(words, {"scenario": str, **known})
    name, trials, seed = (given.pop(*default) for default in _DEFAULTS.items())
    return *compose(name, given), trials, seed


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"failures": _failures}

if __name__ == "__main__":
    sys.exit(main())
