"""Where a run stands: what a checkpoint holds besides tensors, and where the run ends."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hlat import phase
from hlat.config.errors import ConfigError
from hlat.config.run import Config

_MOST = 2**63 - 1

_FIRST = ("step", "tokens", "data", "fixed", "adjustable")
"""What checkpoints have always had; the rest may be missing in an old one."""


@dataclass(frozen=True)
class TrainingState:
    """Position of a run, and the settings that brought it there.

    Attributes:
        step: Optimizer steps done.
        tokens: Tokens consumed.
        data: The loader's own state, as of the newest save.
        fixed: Settings that may not change when the run goes on (config.identity.fixed).
        adjustable: Settings whose change is allowed and told (config.identity.adjustable).
        config: The configuration as it was composed, in YAML; interpolations as they were typed.
        code_revision: Of the code that saved; empty where it is not known.
        tracker: What each service that shows the run calls it (tracking.services).
        weights_only: Whether the checkpoint lacks what a run needs to go on, the optimizer's
            moments and the loader's position; `data` holds no more than the fingerprint then.
        averaged_from: Of an average, each checkpoint that went into it: its path, its step, the
            sha256 of its manifest.json, and its weight.
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

    def after_step(self, tokens: int) -> "TrainingState":
        """Return the state one step of `tokens` tokens later."""
        return dataclasses.replace(self, step=self.step + 1, tokens=self.tokens + tokens)

    def of_weights(self) -> "TrainingState":
        """Return the state of a checkpoint that holds the weights only."""
        data = {key: value for key, value in self.data.items() if key == "fingerprint"}
        return dataclasses.replace(self, data=data, weights_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON knows it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "TrainingState":
        """Return the state that `to_json` wrote.

        Raises:
            ConfigError: It is none: another version of hlat wrote it, or somebody else.
        """
        kinds = {key: type(one) for key, one in cls().to_json().items()}
        known = value if isinstance(value, dict) else {}
        newer = {key: one for key, one in cls().to_json().items() if key not in _FIRST}
        given = {**newer, **known}
        wrong = [key for key, kind in kinds.items() if type(given.get(key)) is not kind]
        wrong += sorted(set(known) - set(kinds))
        if wrong or not 0 <= known["step"] <= _MOST or not 0 <= known["tokens"] <= _MOST:
            raise ConfigError(
                "the checkpoint's state.json was not written by this version of hlat: "
                f"{', '.join(wrong) or 'step or tokens'} cannot be understood"
            )
        return cls(**known)


def total_steps(config: Config) -> int:
    """Return the run's last step: the first of run.steps, the schedule's and the phase's end."""
    ends = (
        config.run.steps,
        config.schedule.total_steps,
        phase.num_steps(config.phase, config.batch),
    )
    return min(end for end in ends if end is not None)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return "key was x, is y" for every setting that differs."""
    keys = sorted(set(before) | set(now))
    return [
        f"{key} was {before.get(key)}, is {now.get(key)}"
        for key in keys
        if before.get(key) != now.get(key)
    ]
