"""Rules about recovery: what is counted, and how long things may take.

As in hlat.config.rules, each is one small function that yields one sentence a violation.
"""

from collections.abc import Callable, Iterator

from hlat.config.run import Config


def divergence(config: Config) -> Iterator[str]:
    """A jump that lasts is noticed before it has become the average."""
    recovery = config.recovery
    if not 1 <= recovery.rollback_after < recovery.spike_window:
        yield (
            f"recovery.rollback_after={recovery.rollback_after} is not between 1 and "
            f"recovery.spike_window={recovery.spike_window} - 1; lower the first or raise the "
            "second"
        )


def timeouts(config: Config) -> Iterator[str]:
    """A step takes less than everything that takes longer."""
    recovery = config.recovery
    step, start = recovery.step_timeout_s, recovery.start_timeout_s
    if step is not None and not 0 < step <= start:
        yield (
            f"recovery.step_timeout_s={step:g} is not between 0 and "
            f"recovery.start_timeout_s={start:g}; set it to a few times a step's duration, or null"
        )


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (divergence, timeouts)
