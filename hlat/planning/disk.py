"""Bytes that a run writes, which follow from the model's shape and the recipe alone."""

from hlat.config.precision import Precision
from hlat.config.run import Config
from hlat.model.canonical import num_parameters
from hlat.precision import bytes_of


def checkpoint_bytes(config: Config) -> int:
    """Bytes of one checkpoint: what the optimizer updates, and both its moments.

    Headers, hashes and the position in the data, some hundred bytes a tensor, are not among them.
    """
    return num_parameters(config.model) * saved_per_parameter(config.precision)


def saved_per_parameter(precision: Precision) -> int:
    """Bytes that a checkpoint holds of each parameter."""
    updated = precision.master_weights or precision.weights
    return bytes_of(updated) + 2 * bytes_of(precision.optimizer_state)
