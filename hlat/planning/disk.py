"""Bytes that a run writes, which follow from the model's shape and the recipe alone."""

from hlat.config.run import Config
from hlat.model.canonical import num_parameters
from hlat.precision import bytes_of


def checkpoint_bytes(config: Config) -> int:
    """Bytes of one checkpoint: what the optimizer updates, and both its moments.

    Headers, hashes and the position in the data, some hundred bytes a tensor, are not among them.
    """
    precision = config.precision
    updated = precision.master_weights or precision.weights
    per_parameter = bytes_of(updated) + 2 * bytes_of(precision.optimizer_state)
    return num_parameters(config.model) * per_parameter
