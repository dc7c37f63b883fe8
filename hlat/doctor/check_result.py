"""Results of the doctor's checks."""

from dataclasses import dataclass, field
from enum import Enum

from hlat.config.run import Config


class CheckStatus(Enum):
    """Status of a check."""

    passed = "pass"
    failed = "FAIL"
    not_applicable = "n/a"


@dataclass(frozen=True)
class FaultLocation:
    """Location of a fault.

    Attributes:
        part: Canonical name of a parameter, or another faulty part.
        axis: tp, sp, pp, dp or kv: axis along which ranks disagree or sums are wrong; compiler:
            the fault exists only with compiled layers; model: it exists on a single process.
    """

    part: str
    axis: str


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: message with the measured values, and fault locations, the worst first.

    `numbers` contains the measured values and the tolerance; `seconds` is the duration.
    """

    check: str
    status: CheckStatus
    message: str
    culprits: list[FaultLocation] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def build_result(
    check: str,
    faults: list[FaultLocation],
    passed_message: str,
    failed_message: str,
    **numbers: float,
) -> CheckResult:
    """Return a passed result without faults, else a failed one."""
    status = CheckStatus.failed if faults else CheckStatus.passed
    return CheckResult(check, status, failed_message if faults else passed_message, faults, numbers)


def skip_check(check: str, reason: str) -> CheckResult:
    """Return the result of a check that does not apply."""
    return CheckResult(check, CheckStatus.not_applicable, reason)


def format_parallel_axes(config: Config) -> str:
    """Return the axes with several ranks as "tp+pp+dp", or "model" if there are none."""
    layout = config.parallelism
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp or 1}
    return "+".join(axis for axis, size in sizes.items() if size > 1) or "model"
