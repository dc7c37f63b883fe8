"""Last step of a run, its extension, and the steps of its milestones."""

from hlat.config.phase_steps import compute_phase_steps
from hlat.config.run import Config


def compute_total_steps(config: Config) -> int:
    """Return the last step: the minimum of run.steps and the ends of schedule and phase."""
    ends = (
        config.run.steps,
        config.schedule.total_steps,
        compute_phase_steps(config.phase, config.batch),
    )
    return min(end for end in ends if end is not None)


def compute_extension(config: Config, step: int) -> dict[str, int]:
    """Return the settings with which a run that ended at `step` trains up to twice the steps.

    The end of the schedule changes only if nothing else ends the run. Empty if its phases end.
    """
    phase_end = compute_phase_steps(config.phase, config.batch) or 2 * step
    last_step = min(2 * step, phase_end)
    if step >= last_step:
        return {}
    if step < config.schedule.total_steps:
        return {"run.steps": min(last_step, config.schedule.total_steps)}
    changes = {} if config.run.steps is None else {"run.steps": last_step}
    return {**changes, "schedule.total_steps": last_step}


def is_milestone(step: int, config: Config) -> bool:
    """Return True if the run saves the weights of `step` permanently, in milestones/."""
    interval, per_step = config.checkpoint.milestone_tokens, config.batch.tokens_per_step
    if interval is None:
        return False
    return step * per_step // interval > (step - 1) * per_step // interval
