"""State of a run besides tensors (state.json of a checkpoint), and its total number of steps."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hlat.config import phase_steps, run_identity
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config

_MAX_INT64 = 2**63 - 1
_SOURCE_PREFIX, _TOKENIZER_KEY = "data.sources.", "data.tokenizer"
"""Keys of the fingerprint of the data that depend on the content of files."""
_SOURCE = "a source"
"""Value of each source where the content of the files is not compared."""
_REQUIRED_FIELDS = ("step", "tokens", "data", "fixed", "adjustable")
"""Fields of every checkpoint; older ones may lack the others."""


@dataclass(frozen=True)
class TrainingState:
    """Position of a run and the settings that produced it.

    Attributes:
        step: Completed optimizer steps.
        tokens: Consumed tokens.
        data: State of the data loader at the last save.
        fixed: Settings that must not change on resume (run_identity.collect_fixed_settings).
        adjustable: Settings that may change on resume and are then reported
            (run_identity.collect_adjustable_settings).
        config: Composed configuration in YAML, with interpolations unresolved.
        code_revision: Git revision of the code that saved; empty if unknown.
        tracker: Run identifier in each tracking service.
        weights_only: True if the checkpoint lacks optimizer state and data position; `data` then
            contains only the fingerprint.
        averaged_from: For an average, the path, step, sha256 of manifest.json, and weight of each
            source checkpoint.
    """

    step: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    adjustable: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    code_revision: str = ""
    tracker: dict[str, str] = field(default_factory=dict)
    weights_only: bool = False
    averaged_from: list[dict[str, Any]] = field(default_factory=list)

    def after_step(self, num_tokens: int) -> "TrainingState":
        """Return the state after another step of `num_tokens` tokens."""
        return dataclasses.replace(self, step=self.step + 1, tokens=self.tokens + num_tokens)

    def to_weights_only(self) -> "TrainingState":
        """Return the state of a checkpoint with weights only."""
        data = {key: value for key, value in self.data.items() if key == "fingerprint"}
        return dataclasses.replace(self, data=data, weights_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return the state in JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "TrainingState":
        """Return the state from the output of `to_json`.

        Raises:
            ConfigError: The value is not a state of this version of hlat.
        """
        defaults = cls().to_json()
        given = value if isinstance(value, dict) else {}
        optional = {key: item for key, item in defaults.items() if key not in _REQUIRED_FIELDS}
        complete = {**optional, **given}
        wrong = [key for key, item in defaults.items() if type(complete.get(key)) is not type(item)]
        wrong += sorted(set(given) - set(defaults))
        if wrong or not 0 <= given["step"] <= _MAX_INT64 or not 0 <= given["tokens"] <= _MAX_INT64:
            raise ConfigError(
                "the checkpoint's state.json was not written by this version of hlat: "
                f"{', '.join(wrong) or 'step or tokens'} cannot be understood"
            )
        return cls(**given)


def compute_total_steps(config: Config) -> int:
    """Return the last step: the minimum of run.steps and the ends of schedule and phase."""
    ends = (
        config.run.steps,
        config.schedule.total_steps,
        phase_steps.compute_phase_steps(config.phase, config.batch),
    )
    return min(end for end in ends if end is not None)


def build_last_state(config: Config) -> TrainingState:
    """Return the state in the last checkpoint of a run, as far as the settings determine it."""
    settings = run_identity.collect_data_settings(config.data, config.batch, config.run.seed)
    sources = {f"{_SOURCE_PREFIX}{name}": _SOURCE for name in config.data.sources}
    step = compute_total_steps(config)
    return TrainingState(
        step=step,
        tokens=step * config.batch.tokens_per_step,
        data={"fingerprint": settings | sources},
        fixed=run_identity.collect_fixed_settings(config),
        adjustable=run_identity.collect_adjustable_settings(config),
    )


def find_start_problems(
    config: Config, saved: TrainingState, path: str, is_same_run: bool = False
) -> list[str]:
    """Return the reasons why a run cannot start from a checkpoint; empty if it can.

    The content of the data files is compared when the run opens them. `is_same_run` is True for a
    resume of the run that saved the checkpoint.
    """
    if saved.weights_only:
        return [
            "it contains weights only, and a run also needs the optimizer state and the position "
            f"in the data; to start a new run from the weights: hlat export {path} output=DIR, "
            "then model.init_from=DIR instead of checkpoint.start_from"
        ]
    current = build_last_state(config)
    fixed, remedy = saved.fixed, "set it back or choose another run.name"
    if not is_same_run:  # a branch may have initial weights of another origin
        origin = run_identity.INITIAL_WEIGHTS_DEFAULTS
        fixed = {key: value for key, value in fixed.items() if key not in origin}
        remedy = "set it back or choose another checkpoint.start_from"
    problems = [f"{line}; {remedy}" for line in find_differences(fixed, current.fixed)]
    settings = current.data["fingerprint"]
    recorded = {
        key: _SOURCE if key.startswith(_SOURCE_PREFIX) else value
        for key, value in saved.data["fingerprint"].items()
        if key != _TOKENIZER_KEY
    }
    problems += run_identity.compare_data_settings(settings, recorded, config.data.allow_changed)[1]
    if not is_same_run and current.step <= saved.step:
        problems.append(
            f"it has step {saved.step:,}, and the run ends at step {current.step:,}; increase "
            "run.steps, schedule.total_steps or the phase"
        )
    return problems


def compute_extension(config: Config, step: int) -> dict[str, int]:
    """Return the settings with which a run that ended at `step` trains up to twice the steps.

    The end of the schedule changes only if nothing else ends the run. Empty if its phases end.
    """
    phase_end = phase_steps.compute_phase_steps(config.phase, config.batch) or 2 * step
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


def find_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return "key was x, is y" for each setting that differs."""
    return [
        f"{key} was {before.get(key)}, is {now.get(key)}"
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]
