"""What a check has found."""

from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """How a check ended."""

    passed = "pass"
    failed = "FAIL"
    not_applicable = "n/a"


@dataclass(frozen=True)
class Culprit:
    """Where something is wrong.

    Attributes:
        part: A parameter's canonical name, or what else is wrong.
        axis: tp, sp, pp, dp or kv: along which ranks disagree or do not add up; model: on one
            process alone.
    """

    part: str
    axis: str


@dataclass(frozen=True)
class Outcome:
    """What one check has found.

    Attributes:
        check: Its name.
        status: How it ended.
        said: A sentence with the numbers.
        culprits: What is to blame, the worst first.
        numbers: What was measured, and the tolerance.
        seconds: How long it took.
    """

    check: str
    status: Status
    said: str
    culprits: list[Culprit] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def judged(check: str, culprits: list[Culprit], good: str, bad: str, **numbers: float) -> Outcome:
    """Pass and say what is good where nobody is to blame, else fail."""
    status = Status.failed if culprits else Status.passed
    return Outcome(check, status, bad if culprits else good, culprits, numbers)


def not_applicable(check: str, why: str) -> Outcome:
    """Neither pass nor fail."""
    return Outcome(check, Status.not_applicable, why)
