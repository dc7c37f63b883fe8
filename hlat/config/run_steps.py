"""Last step of a run, its extension, and the steps of its milestones."""

from hlat.config.batch_steps import count_full_batches, count_steps, count_tokens
from hlat.config.phase_steps import compute_phase_steps
from hlat.config.run import Config


def compute_total_steps(config: Config) -> int:
    """Return the last step: the minimum of run.steps and the ends of schedule and phase."""
    ends = (config.schedule.total_steps, compute_phase_steps(config.phase, config.batch))
    end = min(end for end in ends if end is not None)
    steps = count_steps(end * config.batch.tokens_per_step, config.batch)
    return steps if config.run.steps is None else min(steps, config.run.steps)


def count_readable_batches(config: Config) -> int:
    """Return the full batches that a run reads at most, without rollbacks."""
    steps = count_steps(config.schedule.total_steps * config.batch.tokens_per_step, config.batch)
    return count_full_batches(steps, config.batch)


def compute_extension(config: Config, step: int) -> dict[str, int]:
    """Return the settings with which a run that ended at `step` trains up to twice the steps.

    The end of the schedule changes only if nothing else ends the run. Empty if its phases end.
    """
    batch, phase_end = config.batch, compute_phase_steps(config.phase, config.batch)
    last_step, per_step = 2 * step, batch.tokens_per_step
    if phase_end is not None:
        last_step = min(last_step, count_steps(phase_end * per_step, batch))
    if step >= last_step:
        return {}
    if step < (schedule_end := count_steps(config.schedule.total_steps * per_step, batch)):
        return {"run.steps": min(last_step, schedule_end)}
    changes = {} if config.run.steps is None else {"run.steps": last_step}
    return {**changes, "schedule.total_steps": count_full_batches(last_step, batch)}


def is_diagnosed(step: int, config: Config) -> bool:
    """Return True if the run logs diagnostics of `step`."""
    return config.tracking.diagnostics and step % config.tracking.metrics_every == 0


def is_milestone(step: int, config: Config) -> bool:
    """Return True if the run saves the weights of `step` permanently, in milestones/."""
    interval, batch = config.checkpoint.milestone_tokens, config.batch
    if interval is None:
        return False
    return count_tokens(step, batch) // interval > count_tokens(step - 1, batch) // interval
