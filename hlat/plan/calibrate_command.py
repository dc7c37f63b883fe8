"""Action of `hlat plan` that fits the planner's constants to measured runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import CommandLineParser
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.plan.calibration import Calibration

_EXAMPLES = """\
With suggest=true, the words are overrides of hlat train, and the command prints three short runs.
Without it, the words are directories of runs, of one kind of nodes.

examples:
  hlat plan calibrate suggest=true model=7b hardware=h100_p5 hardware.nodes=2
  hlat plan calibrate runs/calibrate_1 runs/calibrate_2 runs/calibrate_3 output=cluster.yaml
  hlat plan model=7b hardware=h100_p5 hardware.nodes=64 hardware.calibration=cluster.yaml

docs/planning.md has the method."""
_NUM_RUNS = 3
_NUM_STEPS = 20


def run_calibrate(argv: Sequence[str]) -> int:
    """Print constants fitted to runs, or the runs that determine them; return the exit code."""
    parser = CommandLineParser(
        "plan calibrate",
        "Fit the constants of the planner to the step times of measured runs.",
        _EXAMPLES,
        takes_overrides=True,
    )
    parser.add_overrides("directories of runs; with suggest=true overrides of hlat train")
    suggest = "print the commands of three short runs in the layouts that determine most"
    parser.add_argument("--suggest", action="store_true", help=suggest)
    output = "file for the constants; without it they are printed only"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    arguments = parser.parse(argv)
    if arguments.suggest:
        if arguments.output is not None:
            raise ConfigError("output= is for the constants; remove it, or suggest=true")
        print("\n".join(_suggest(arguments.overrides)))
    else:
        print("\n".join(_calibrate(arguments.overrides, arguments.output)))
    return ExitCode.FINISHED


def _suggest(overrides: Sequence[str]) -> list[str]:
    """Return the commands of the suggested runs, and of their calibration."""
    from hlat.config.compose import compose_config
    from hlat.config.resolve import resolve_config
    from hlat.plan import plan_text
    from hlat.plan.calibration import suggest_runs

    config = resolve_config(compose_config(overrides))
    runs, start = suggest_runs(config, _NUM_RUNS)
    lines = [
        plan_text.format_headline(config),
        f"standard deviation of the predicted step times of all layouts: {start:.0%}",
        "",
    ]
    names = [f"calibrate_{i + 1}" for i in range(len(runs))]
    for name, run in zip(names, runs, strict=True):
        steps = (f"run.name={name}", f"run.steps={_NUM_STEPS}", "schedule.warmup_steps=1")
        command = plan_text.format_train_command(overrides, [*run.overrides, *steps])
        lines += [f"{run.std:.0%} after", f"  {command}"]
    directories = shlex.join(str(Path(config.run.root) / name) for name in names)
    return [*lines, "", "then:", f"  hlat plan calibrate {directories} output=cluster.yaml"]


def _calibrate(words: Sequence[str], output: Path | None) -> list[str]:
    """Return the text of a calibration, and write its constants."""
    from hlat.plan.calibration import calibrate, load_measured_run
    from hlat.plan.calibration_file import write_calibration

    if not words:
        raise ConfigError(
            "calibrate needs directories of runs; hlat plan calibrate suggest=true proposes some"
        )
    calibration = calibrate([load_measured_run(Path(word)) for word in dict.fromkeys(words)])
    lines = _format_calibration(calibration)
    if output is not None:
        write_calibration(output, calibration.runs[0].config, calibration.efficiency)
        lines += ["", f"wrote {output}; plan with hardware.calibration={output}"]
    return lines


def _format_calibration(calibration: "Calibration") -> list[str]:
    from hlat.plan.calibration_file import CONSTANTS
    from hlat.tracking.text_format import format_duration, format_short, format_table

    runs, hardware = calibration.runs, calibration.runs[0].config.hardware
    rows = [
        [
            run.name,
            format_duration(run.step_s),
            *(f"{format_duration(s)} ({s / run.step_s - 1:+.1%})" for s in planned),
        ]
        for run, planned in zip(runs, calibration.planned_s, strict=True)
    ]
    constants = [
        [name, f"x {factor:.3g}", field, *(format_short(getattr(e, field)) for e in versions)]
        for name, factor in calibration.factors.items()
        for versions in [(calibration.base, calibration.efficiency)]
        for field in CONSTANTS[name]
        if getattr(calibration.base, field)
    ]
    low, high = calibration.efficiency.interval
    headers = ["run", "step", "planned before", "after", "fitted to the others"]
    return [
        f"{len(runs)} runs on {hardware.name}; constants before: {calibration.base.source}",
        "",
        *format_table(headers, rows),
        "",
        *format_table(["constants", "factor", "name", "before", "after"], constants),
        "",
        f"80% interval of a step time: {low - 1:+.0%} to {high - 1:+.0%} of the predicted one",
    ]
