"""Runner of all checks: console output, doctor.json and exit code.

Every rank runs every check; rank 0 evaluates and reports.
"""

import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hlat.config.config_errors import ExitCode
from hlat.config.redaction import redact_data
from hlat.config.run import Config
from hlat.distributed import rank_environment
from hlat.distributed.heartbeat import Heartbeat, open_heartbeat
from hlat.doctor.accumulation_check import check_accumulation
from hlat.doctor.backward_check import check_backward
from hlat.doctor.causality_check import check_causality
from hlat.doctor.check_result import (
    CheckResult,
    CheckStatus,
    FaultLocation,
    build_result,
    skip_check,
)
from hlat.doctor.checkpoint_check import check_checkpoint
from hlat.doctor.coordinate_check import check_coordinates
from hlat.doctor.data_order_check import check_data
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.evaluation_check import check_decoding, check_labels
from hlat.doctor.fp32_operator_check import check_fp32_operators
from hlat.doctor.gradient_check import check_gradients
from hlat.doctor.initialisation_check import check_initialisation
from hlat.doctor.master_copy_check import check_master_copy
from hlat.doctor.next_step_check import check_next_step
from hlat.doctor.optimizer_check import check_numerics, check_optimizer
from hlat.doctor.replica_check import check_replicas
from hlat.doctor.rounding_check import check_rounding
from hlat.doctor.schedule_check import check_schedule
from hlat.doctor.skip_check import check_skipping
from hlat.engine.interface import Engine
from hlat.recovery import preflight
from hlat.storage.durable_files import replace_file
from hlat.storage.progress_bar import print_line
from hlat.tracking.jsonl_log import replace_non_finite

REPORT_FILE = "doctor.json"
_MAX_WAIT_S = 60.0
"""Seconds that a rank with an exception waits for the other ranks."""

Check = Callable[[EngineHarness], Iterator[CheckResult]]

CHECKS: dict[str, Check] = {
    "initialisation": check_initialisation,
    "causality": check_causality,
    "labels": check_labels,
    "decoding": check_decoding,
    "backward": check_backward,
    "gradients": check_gradients,
    "next step": check_next_step,
    "accumulation": check_accumulation,
    "replicas": check_replicas,
    "rounding": check_rounding,
    "master copy": check_master_copy,
    "fp32 operators": check_fp32_operators,
    "optimizer": check_optimizer,
    "skipping": check_skipping,
    "schedule": check_schedule,
    "numerics": check_numerics,
    "data": check_data,
    "checkpoint": check_checkpoint,
}
"""Checks in order; the first needs the initial weights."""
OPTIONAL_CHECKS: dict[str, Check] = {"coordinates": check_coordinates}
"""Checks that run only if `checks=` names them."""
SYMPTOMS = {
    "machine": "results that no other machine reproduces, or steps that wait for one node",
    "initialisation": "no symptom for a long time: HLAT-7B without scaled initial weights diverged "
    "at step 22,000 (slides of the paper)",
    "causality": "a loss that falls too fast, and meaningless generated text: HLAT noticed a mask "
    "that leaked the future after 10,000 steps (slides of the paper)",
    "labels": "a loss that stays at chance level (shift 2 or more) or falls to zero (shift 0); "
    "evaluations that are not comparable",
    "decoding": "meaningless generated text and wrong scores of a good model",
    "backward": "a loss that is worse than the idea deserves: the gradient is that of another "
    "function",
    "loss": "a loss that is not comparable with other runs",
    "gradients": "a loss curve that is slightly worse than possible, for the whole run",
    "reduction": "almost no symptom in the loss curve (slides of the paper); ranks train "
    "separately, as with a smaller batch or another learning rate",
    "pipeline": "a smaller batch than configured, or another learning rate",
    "gradient norm": "clipping that depends on the layout: gradient norms jump when a run resumes "
    "on another number of nodes",
    "clipping": "another learning rate at the start and at spikes, which clipping prevents",
    "next step": "a loss that lags behind, or differs between ranks after the first update",
    "accumulation": "other results for another micro batch size or number of nodes",
    "replicas": "a validation loss that depends on the rank whose weights were saved; slow drift "
    "of norms and key/value heads between tensor-parallel ranks (paper, section IV-C)",
    "rounding": "a loss that stops falling after learning rate decay, or growing weights",
    "master copy": "a loss that stops falling after learning rate decay",
    "fp32 operators": "a slightly worse loss, and divergence of long runs",
    "optimizer": "a rough start (bias correction), or learning rates and weight decay that do not "
    "transfer from other codebases",
    "skipping": "weights that are NaN after one bad batch",
    "schedule": "a run that ends at a wrong learning rate",
    "numerics": "a gradient norm that grows slowly while the loss still falls (slides of the "
    "paper)",
    "data": "text that is seen twice or never; a jump of the loss after a restart",
    "checkpoint": "a jump of the loss after a restart or a change of the number of nodes",
    "coordinates": "a best learning rate that depends on width or depth, so that settings tuned "
    "for a small model are wrong for a large one",
}
"""Symptom of a fault in a run, by name of a result."""


def run_all_checks(
    config: Config, run_dir: Path, engine: Engine, names: Sequence[str] = ()
) -> ExitCode:
    """Run pre-flight and checks, write doctor.json, and return the exit code.

    `config` is the reduced configuration; `engine` has no process groups yet, and is closed on
    return. Without names, the checks are `CHECKS`.
    """
    start, is_rank0 = time.perf_counter(), rank_environment.read_rank_info().is_rank0
    if is_rank0:
        # An aborted run must not leave the result of an earlier one
        (run_dir / REPORT_FILE).unlink(missing_ok=True)
    machine = _check_machine(config, run_dir, engine)
    results = [machine] if is_rank0 else []
    if is_rank0:
        _print_result(machine)
    code = ExitCode.UNHEALTHY_NODE
    if machine.status is not CheckStatus.failed:
        harness = EngineHarness(config, engine)
        for result in run_checks(harness, names or CHECKS):
            _print_result(result)
            results.append(result)
        has_failed = any(result.status is CheckStatus.failed for result in results)
        code = ExitCode.DIVERGED if has_failed else ExitCode.FINISHED
        code = ExitCode(harness.broadcast_object(code))
        engine.close()
    if is_rank0:
        seconds = time.perf_counter() - start
        _write_report(config, run_dir, engine.device, results, seconds)
        _print_summary(run_dir, results, seconds)
    return code


def run_checks(harness: EngineHarness, names: Iterable[str] = CHECKS) -> Iterator[CheckResult]:
    """Run checks by name and yield their results on rank 0."""
    heartbeat = open_heartbeat()
    for name in names:
        if heartbeat is not None:
            heartbeat.set_deadline(harness.config.recovery.start_timeout_s)
            heartbeat.has_started = True
        start = time.perf_counter()
        results = _run_check(harness, name, heartbeat)
        seconds = round(time.perf_counter() - start, 3)
        if harness.is_rank0:
            yield from (replace(result, seconds=seconds) for result in results)


def _run_check(harness: EngineHarness, name: str, heartbeat: Heartbeat | None) -> list[CheckResult]:
    """Return the results of a check; an exception on any rank is a failed check.

    If other ranks wait in a collective call of the check, the supervisor ends all processes.
    """
    results, message = list[CheckResult](), None
    try:
        results.extend((CHECKS | OPTIONAL_CHECKS)[name](harness))
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        if heartbeat is not None:
            print_line(f"the check {name} raised an exception; waiting for the other ranks")
            heartbeat.set_deadline(_MAX_WAIT_S)
    messages = harness.engine.parallel_state.world_group.gather_object(message)
    for rank, text in enumerate(messages):
        if text is not None:
            location = FaultLocation(f"rank {rank}", "model")
            failure = build_result(name, [location], "", f"the check raised {text} on rank {rank}")
            return [*results, failure]
    return results


def _check_machine(config: Config, run_dir: Path, engine: Engine) -> CheckResult:
    """Run the pre-flight of a run, which reports unhealthy nodes itself."""
    if not config.recovery.preflight:
        return skip_check("machine", "recovery.preflight is false")
    start = time.perf_counter()
    is_healthy = preflight.run_preflight(config, run_dir, engine)
    result = build_result(
        "machine",
        [] if is_healthy else [FaultLocation("a node", "machine")],
        "devices, collectives, memory, disk and clocks are healthy",
        f"a node is unhealthy; see {run_dir / 'events.jsonl'}",
    )
    return replace(result, seconds=round(time.perf_counter() - start, 3))


def _print_result(result: CheckResult) -> None:
    print_line(f"{result.status.value:<5} {result.check:<15} {result.message}")
    if result.status is CheckStatus.failed:
        print_line(f"{'':21} in a run: {SYMPTOMS[result.check]}")


def _print_summary(run_dir: Path, results: list[CheckResult], seconds: float) -> None:
    count = Counter(result.status for result in results)
    failed = [result.check for result in results if result.status is CheckStatus.failed]
    verdict = f"FAIL: {', '.join(failed)}" if failed else "healthy"
    print_line(
        f"{verdict}; {count[CheckStatus.passed]} passed, {len(failed)} failed, "
        f"{count[CheckStatus.not_applicable]} not applicable, in {seconds:.0f} s; "
        f"{run_dir / REPORT_FILE}"
    )


def _write_report(
    config: Config, run_dir: Path, device: str, results: list[CheckResult], seconds: float
) -> None:
    record = {
        "healthy": all(result.status is not CheckStatus.failed for result in results),
        "engine": config.engine.name,
        "device": device,
        "precision": config.precision.name,
        "num_processes": config.num_processes,
        "parallelism": asdict(config.parallelism),
        "model": asdict(config.model),
        "batch": asdict(config.batch),
        "seconds": round(seconds, 1),
        "checks": [asdict(result) | {"symptom": SYMPTOMS[result.check]} for result in results],
    }
    text = json.dumps(
        replace_non_finite(redact_data(record)), indent=2, default=lambda member: member.value
    )
    replace_file(run_dir / REPORT_FILE, f"{text}\n".encode())
