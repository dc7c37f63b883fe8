"""Write the tables of README.md from the results beside it.

Usage: PYTHONPATH=. python tests/faults/render_trials.py
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table, write_between

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
Row = dict[str, Any]
TRIP_PROBLEMS = ("other_bytes", "another_next_loss")


def read(name: str) -> Row:
    """A result."""
    found: Row = json.loads((HERE / f"{name}.json").read_text())
    return found


def again(found: Row) -> str:
    """How many restarts repeated how many steps."""
    return ", ".join(f"{count} x {steps}" for steps, count in found["steps_run_again"].items())


def kills(result: Row) -> str:
    """A row for each kind of run that was killed."""
    rows = []
    for name, found in result["arms"].items():
        killed = ", ".join(f"{what} {number}" for what, number in sorted(found["killed"].items()))
        numbers = [found[key] for key in ("kills", "in_startup", "in_a_save")]
        rows.append(
            [
                name,
                *map(str, numbers),
                str(found["checkpoints_verified"]),
                str(len(found["problems"])),
                again(found),
                killed,
            ]
        )
    header = ["run", "kills", "in start-up", "in a save", "checkpoints verified", "problems"]
    return table([*header, "restarts x steps run again", "killed"], rows)


def layouts(result: Row) -> str:
    """What changing layouts cost."""
    apart = [[name, f"{value:.1e}"] for name, value in result["by_layout"].items()]
    apart.append([f"another at each of {result['kills']} kills", f"{max(result['largest']):.1e}"])
    return table(["layout", "largest relative difference of a loss"], apart)


def seconds(found: Row | None) -> str:
    """Median and range."""
    return "" if found is None else f"{found['median']:g} ({found['min']:g} to {found['max']:g})"


def signals(result: Row) -> str:
    """A row for each kind of run that was interrupted."""
    rows = []
    for name, found in result["signals"].items():
        codes, early = found["codes"], found["before_training"]
        steps = ", ".join(f"{n} x {s}" for s, n in sorted(found["steps_until_saved"].items()))
        rows.append(
            [
                name,
                str(found["signals"]),
                ", ".join(f"{number} x {code}" for code, number in codes.items()),
                ", ".join(f"{number} x {code}" for code, number in early.items()),
                steps,
                str(found["steps_run_again"]),
                seconds(found["seconds"]),
            ]
        )
    header = ["run", "signals", "exit code", "before steps ran", "signals x steps until saved"]
    return table([*header, "steps run again", "seconds until exit"], rows)


def hangs(result: Row) -> str:
    """A row for each way in which a run hung."""
    rows = [
        [
            name,
            str(found["hung"]),
            seconds(found["seconds_until_restart"]),
            str(found["over_timeout_dump_and_1_s"]),
            str(len(found["problems"])),
        ]
        for name, found in result["hangs"].items()
    ]
    return table(
        ["run and what hangs", "trials", "seconds until restart", "later than 5 s", "problems"],
        rows,
    )


def disk(result: Row) -> str:
    """A row for each way in which a disk failed."""
    rows = [
        [
            f"{name} at each call",
            str(found["saves"]),
            str(found["failed"]),
            str(found["told_on_the_console"]),
            str(len(found["failed_and_the_next_one_too"])),
            str(len(found["lost_or_damaged"])),
            found["losses"] or "identical",
        ]
        for name, found in result["each_call"].items()
    ]
    full = result["full_at_times"]
    rows.append(
        [
            f"full, {full['times_full']} times",
            str(full["saves"] + full["saves_failed"]),
            str(full["saves_failed"]),
            "",
            "",
            str(len(full["lost_or_damaged"])),
            full["losses"] or "identical",
        ]
    )
    header = ["disk", "saves", "failed", "told", "next one failed too", "checkpoints lost"]
    return table([*header, "losses"], rows)


def no_room(result: Row) -> str:
    """A row for each start without room."""
    rows = [
        [
            name,
            str(found["exit_code"]),
            "yes" if found["traceback"] else "no",
            " ".join(found["said"]).replace("|", "/"),
        ]
        for name, found in result["no_room"].items()
    ]
    return table(["no room in", "exit code", "traceback", "said"], rows)


def round_trips(result: Row) -> str:
    """A row for each recipe."""
    rows = [
        [recipe, str(found["trips"]), *(str(len(found[key])) for key in TRIP_PROBLEMS)]
        for recipe, found in result["round_trips"].items()
    ]
    return table(["recipe", "trips", "other bytes", "another next loss"], rows)


def bad_numbers(result: Row) -> str:
    """A row for each kind."""
    rows = []
    for name, found in result.items():
        if isinstance(found, dict) and "trials" in found:
            of = ", ".join(f"{layout} {number}" for layout, number in found["of"].items())
            rows.append([name, str(found["trials"]), str(found["as_it_should_be"]), of])
    return table(["kind", "trials", "as it should be", "of them"], rows)


def soak(result: Row) -> str:
    """Where the time of the run went, and what hit it if that was noted."""
    faults = [
        [
            name,
            *(str(found[key]) for key in ("number", "in_training")),
            *(seconds(found[key]) for key in ("detect_s", "restart_s")),
        ]
        for name, found in result.get("faults", {}).items()
    ]
    header = ["fault", "number", "while steps ran", "seconds until noticed", "until steps ran"]
    ledger = result["ledger"]
    spent = ledger["seconds"] | {"unaccounted": ledger["unaccounted_s"]}
    shares = [
        [kind, f"{value:,.2f} s", f"{100 * value / ledger['wall_s']:.2f} %"]
        for kind, value in spent.items()
    ]
    tables = [table(header, faults)] if faults else []
    return "\n\n".join([*tables, table(["time", "seconds", "share"], shares)])


def foreseen(result: Row) -> str:
    """Goodput beside its prediction."""
    ledger, plan = result["ledger"], result["prediction"]
    measured = ledger["goodput_with_data_wait"]
    rows = [
        ["measured", f"{100 * measured:.1f} %", f"{100 * ledger['uptime']:.1f} %"],
        ["formula", f"{100 * plan['formula']['training']:.1f} %", ""],
        ["simulation, mean", f"{100 * plan['simulation']['mean']['training']:.1f} %", ""],
        [
            "simulation, 90% of runs",
            f"{100 * plan['simulation']['percentile_5']['training']:.1f} to "
            f"{100 * plan['simulation']['percentile_95']['training']:.1f} %",
            "",
        ],
    ]
    command = f"    python {plan['command']}"
    return "\n\n".join([table(["", "goodput", "uptime of the ledger"], rows), command])


def main() -> None:
    tables = {
        "kills": [kills],
        "layouts": [layouts],
        "signals": [signals, hangs],
        "disk": [disk, no_room],
        "round_trips": [round_trips],
        "bad_numbers": [bad_numbers],
        "soak": [soak, foreseen],
    }
    for name, writers in tables.items():
        if not (HERE / f"{name}.json").exists():
            continue
        result = read(name)
        for writer in writers:
            if writer is foreseen and "prediction" not in result:
                continue
            write_between(README, writer.__name__, f"{writer(result)}\n\n{machine(result)}")


if __name__ == "__main__":
    main()
