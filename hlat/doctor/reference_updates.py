"""Reference updates of all parameters of a model, some of which are rows of one matrix."""

from collections.abc import Mapping

import numpy as np

from hlat.config.run import Config
from hlat.doctor.reference_optimizer import Array, ReferenceState
from hlat.doctor.reference_parametrization import ParameterUpdate
from hlat.model.decoder_spec import list_module_parameters
from hlat.optim.optimizer_spec import group_matrices


def update_states(
    config: Config,
    update: ParameterUpdate,
    states: Mapping[str, ReferenceState],
    gradients: Mapping[str, Array] | None,
    learning_rate: float,
) -> dict[str, ReferenceState]:
    """Return the states after one update; without `gradients`, they are zero.

    The parameters of a matrix have one role.
    """
    matrices = group_matrices(config.optimizer, list_module_parameters(config.model))
    joint = [[spec.name for spec in specs] for specs in matrices if len(specs) > 1]
    joint = [names for names in joint if names[0] in states]
    single = {*states}.difference(*joint)
    updated: dict[str, ReferenceState] = {}
    for names in [*joint, *([name] for name in single)]:
        state = _concatenate([states[name] for name in names])
        gradient: Array | float = 0.0
        if gradients is not None:
            gradient = _concatenate_arrays([gradients[name] for name in names])
        expected = update(names[0], state, gradient, learning_rate)
        rows = [len(states[name].weights) for name in names]
        updated |= zip(names, _split(expected, rows), strict=True)
    return {name: updated[name] for name in states}


def _concatenate(states: list[ReferenceState]) -> ReferenceState:
    """Return the state with the rows of all states."""
    tensors = {
        key: _concatenate_arrays([state.tensors[key] for state in states])
        for key in states[0].tensors
    }
    return ReferenceState(tensors, states[0].updates)


def _concatenate_arrays(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _split(state: ReferenceState, rows: list[int]) -> list[ReferenceState]:
    """Return states with these numbers of rows; a single one may have tensors of other shapes."""
    if len(rows) == 1:
        return [state]
    ends = np.cumsum(rows)
    return [
        ReferenceState(
            {key: tensor[end - count : end] for key, tensor in state.tensors.items()},
            state.updates,
        )
        for end, count in zip(ends, rows, strict=True)
    ]
