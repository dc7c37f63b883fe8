"""State of a run besides tensors: state.json of a checkpoint."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hlat.config.batch import BatchConfig
from hlat.config.batch_steps import count_step_tokens
from hlat.config.config_errors import ConfigError
from hlat.config.renamed_keys import rename_settings

_MAX_INT64 = 2**63 - 1
_REQUIRED_FIELDS = ("step", "tokens", "data", "fixed", "adjustable")
"""Fields of every checkpoint; older ones may lack the others."""


@dataclass(frozen=True)
class TrainingState:
    """Position of a run and the settings that produced it.

    Attributes:
        step: Completed optimizer steps.
        tokens: Consumed tokens.
        data: State of the data loader at the last save, with the batches that it skips.
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

    def after_step(self, batch: BatchConfig) -> "TrainingState":
        """Return the state after another step."""
        tokens = self.tokens + count_step_tokens(self.step, batch)
        return dataclasses.replace(self, step=self.step + 1, tokens=tokens)

    def to_weights_only(self) -> "TrainingState":
        """Return the state of a checkpoint with weights only."""
        data = {key: value for key, value in self.data.items() if key == "fingerprint"}
        return dataclasses.replace(self, data=data, weights_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return the state in JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "TrainingState":
        """Return the state from the output of `to_json`, with present keys of settings.

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
        return cls(**given | {"adjustable": rename_settings(given["adjustable"])})
