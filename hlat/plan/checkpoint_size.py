"""Size of checkpoints."""

from hlat.config.precision import PrecisionConfig
from hlat.config.run import Config
from hlat.model.parameter_specs import count_parameters
from hlat.precision.precision_bytes import get_itemsize


def compute_checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint: (master) weights and both moments.

    Headers, hashes and the data position, some hundred bytes per tensor, are not included.
    """
    return count_parameters(config.model) * compute_saved_bytes_per_parameter(config.precision)


def compute_saved_bytes_per_parameter(precision: PrecisionConfig) -> int:
    """Return the bytes of a checkpoint per parameter."""
    updated = precision.master_weights or precision.weights
    return get_itemsize(updated) + 2 * get_itemsize(precision.optimizer_state)
