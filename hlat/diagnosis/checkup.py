"""All checks, one after the other, what they print, and what is written of them.

Every rank runs every check; the first one judges, and tells.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hlat.config.errors import Exit
from hlat.config.run import Config
from hlat.diagnosis.causality import check_causality, check_labels
from hlat.diagnosis.checkpoint import check_checkpoint
from hlat.diagnosis.gradients import check_accumulation, check_gradients, check_next_step
from hlat.diagnosis.initialisation import check_initialisation
from hlat.diagnosis.numerics import check_numerics
from hlat.diagnosis.patient import Patient
from hlat.diagnosis.replicas import check_replicas
from hlat.diagnosis.rounding import check_rounding
from hlat.diagnosis.streams import check_data
from hlat.diagnosis.symptoms import SYMPTOMS
from hlat.diagnosis.update import check_optimizer, check_schedule
from hlat.diagnosis.verdict import Culprit, Outcome, Status, judged, not_applicable
from hlat.engine import processes
from hlat.engine.interface import Engine
from hlat.recovery import preflight
from hlat.tracking.console import tell

RECORD = "doctor.json"

Check = Callable[[Patient], list[Outcome]]

CHECKS: Mapping[str, Check] = {
    "initialisation": check_initialisation,
    "causality": check_causality,
    "labels": check_labels,
    "gradients": check_gradients,
    "next step": check_next_step,
    "accumulation": check_accumulation,
    "replicas": check_replicas,
    "rounding": check_rounding,
    "optimizer": check_optimizer,
    "schedule": check_schedule,
    "numerics": check_numerics,
    "data": check_data,
    "checkpoint": check_checkpoint,
}
"""In the order in which they run: the first needs weights that nothing has changed."""


def examine(config: Config, folder: Path, engine: Engine) -> Exit:
    """Check machine and arithmetic, print and write down what was found; return the exit code.

    Args:
        config: A shrunk configuration.
        folder: Where doctor.json is written.
        engine: One that has not met the others yet; closed in the end.
    """
    begun, found = time.perf_counter(), []
    leads = processes.place().rank == 0
    if leads:
        # An end half way would leave the verdict of another time
        (folder / RECORD).unlink(missing_ok=True)
    machine = _machine(config, folder, engine)
    if leads:
        _print(machine)
        found.append(machine)
    if machine.status is not Status.failed:
        patient = Patient(config, engine)
        for outcome in check_up(patient):
            _print(outcome)
            found.append(outcome)
        code = Exit(patient.tell(_exit_code(found)))
        device = engine.device
        engine.close()
    else:
        code, device = Exit.UNHEALTHY_NODE, engine.device
    if leads:
        seconds = time.perf_counter() - begun
        _write(config, folder, device, found, seconds)
        _conclude(folder, found, seconds)
    return code


def check_up(patient: Patient, names: Iterable[str] = CHECKS) -> Iterator[Outcome]:
    """Run checks by their names; what they found, on the leader."""
    pulse = processes.pulse()
    for name in names:
        if pulse is not None:
            pulse.expect(patient.config.recovery.start_timeout_s)
        begun = time.perf_counter()
        outcomes = CHECKS[name](patient)
        seconds = round(time.perf_counter() - begun, 3)
        if patient.leads:
            yield from (replace(outcome, seconds=seconds) for outcome in outcomes)


def _machine(config: Config, folder: Path, engine: Engine) -> Outcome:
    """The pre-flight of a run; it tells by itself which node is to blame."""
    if not config.recovery.preflight:
        return not_applicable("machine", "recovery.preflight is false")
    begun = time.perf_counter()
    well = preflight.passed(config, folder, engine)
    outcome = judged(
        "machine",
        [] if well else [Culprit("a node", "machine")],
        "devices, sums, memory, disk and clocks are well",
        f"a node is unhealthy; {folder / 'events.jsonl'} names it",
    )
    return replace(outcome, seconds=round(time.perf_counter() - begun, 3))


def _exit_code(found: list[Outcome]) -> Exit:
    failed = any(outcome.status is Status.failed for outcome in found)
    return Exit.DIVERGED if failed else Exit.FINISHED


def _print(outcome: Outcome) -> None:
    tell(f"{outcome.status.value:<5} {outcome.check:<15} {outcome.said}")
    if outcome.status is Status.failed:
        tell(f"{'':21} in a run: {SYMPTOMS[outcome.check]}")


def _conclude(folder: Path, found: list[Outcome], seconds: float) -> None:
    count = {s: sum(outcome.status is s for outcome in found) for s in Status}
    failed = [outcome.check for outcome in found if outcome.status is Status.failed]
    verdict = f"FAIL: {', '.join(failed)}" if failed else "healthy"
    tell(
        f"{verdict}; {count[Status.passed]} passed, {count[Status.failed]} failed, "
        f"{count[Status.not_applicable]} not applicable, in {seconds:.0f} s; {folder / RECORD}"
    )


def _write(config: Config, folder: Path, device: str, found: list[Outcome], seconds: float) -> None:
    record: dict[str, Any] = {
        "healthy": all(outcome.status is not Status.failed for outcome in found),
        "engine": config.engine.name.value,
        "device": device,
        "precision": config.precision.name,
        "num_processes": config.num_processes,
        "parallelism": _plain(asdict(config.parallelism)),
        "model": _plain(asdict(config.model)),
        "batch": _plain(asdict(config.batch)),
        "seconds": round(seconds, 1),
        "checks": [
            asdict(outcome) | {"status": outcome.status.value, "symptom": SYMPTOMS[outcome.check]}
            for outcome in found
        ],
    }
    written = folder / f".{RECORD}.tmp"
    written.write_text(json.dumps(record, indent=2) + "\n")
    written.replace(folder / RECORD)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Enums by their values."""
    return {key: getattr(value, "value", value) for key, value in settings.items()}
