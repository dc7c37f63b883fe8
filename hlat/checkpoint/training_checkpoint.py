"""Validation of the state and the tensors of a run's checkpoint, and the choice of its weights.

A checkpoint may have been edited and its hashes computed again. A resume and `hlat checkpoint
verify` use the same checks.
"""

from collections.abc import Iterable, Iterator, Sequence

from hlat.checkpoint import checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_lookup import VerifiedCheckpoint
from hlat.checkpoint.checkpoint_manifest import CheckpointManifest
from hlat.checkpoint.training_state import TrainingState
from hlat.config import run_identity
from hlat.config.components import list_registered
from hlat.config.config_errors import ConfigError
from hlat.config.optimizer import OptimizerConfig
from hlat.config.run_identity import build_saved_model_config, build_saved_optimizer_config
from hlat.data import data_fingerprint
from hlat.distributed.object_group import ObjectGroup
from hlat.distributed.state_shard import BUFFERS
from hlat.model.decoder_spec import list_buffer_specs, list_parameter_specs
from hlat.model.parameter_spec import ParameterSpec
from hlat.optim.optimizer_spec import (
    EMA,
    StateTensor,
    compute_saved_shapes,
    find_average,
    get_optimizer_spec,
)
from hlat.storage.storage_path import StoragePath

WEIGHTS = "weights"
"""Key of the weights, where `weights/<parameter>` is a tensor."""


def load_training_state(checkpoint: VerifiedCheckpoint, group: ObjectGroup) -> TrainingState:
    """Return the state of a run on all ranks of a group, after validating state and tensors.

    Raises:
        CorruptCheckpointError: If the state is not that of a run, or contradicts the manifest, or
            tensors of its model or optimizer are missing or have other shapes.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    try:
        document = checkpoint_store.load_shared_state(path, manifest, group)
        state = TrainingState.from_json(document)
        _validate_state(state, manifest)
    except CorruptCheckpointError:
        raise
    except (ArithmeticError, ConfigError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} cannot be resumed: {error}") from error
    return state


def list_fresh_state(
    parameters: Sequence[ParameterSpec], settings: OptimizerConfig, manifest: CheckpointManifest
) -> dict[StateTensor, list[str]]:
    """Return the parameters by each state tensor that starts at zero, or as the weights.

    The checkpoint lacks the tensor, or the updates of the parameter are counted from zero: moments
    of earlier updates, with the bias correction of the first one, would be too large.
    """
    fresh: dict[StateTensor, list[str]] = {}
    restarted = list_restarted_parameters(parameters, settings, manifest)
    for one in parameters:
        for tensor in compute_saved_shapes(settings, one.role, one.shape):
            is_saved = f"{tensor.name}/{one.name}" in manifest.tensors
            if not is_saved or (one.name in restarted and tensor != EMA):
                fresh.setdefault(tensor, []).append(one.name)
    return fresh


def list_restarted_parameters(
    parameters: Sequence[ParameterSpec], settings: OptimizerConfig, manifest: CheckpointManifest
) -> set[str]:
    """Return the parameters whose updates are counted from zero.

    A checkpoint of another optimizer, or of other settings, has other state tensors for them. All
    matrices that are updated as a whole have one count.
    """
    optimizer, restarted = get_optimizer_spec(settings.name), set[str]()
    for parameter in parameters:
        role, name = parameter.role, parameter.name
        tensors = (tensor.name for tensor in optimizer.list_state_tensors(role))
        saved = {key for key in tensors if f"{key}/{name}" in manifest.tensors}
        if saved != {*optimizer.compute_state_shapes(settings, role, parameter.shape)}:
            restarted.add(name)
    whole = {one.name for one in parameters if not optimizer.is_elementwise(one.role)}
    return restarted if restarted.isdisjoint(whole) else restarted | whole


def _validate_state(state: TrainingState, manifest: CheckpointManifest) -> None:
    """Raise ConfigError if state and manifest are not those of one run at one step."""
    if state.step != manifest.step:
        raise ConfigError(f"state.json has step {state.step}, manifest.json has {manifest.step}")
    if not state.weights_only:
        data_fingerprint.validate_state(state.data)
    model = build_saved_model_config(state.fixed, state.config)
    if model.num_layers > len(manifest.tensors):  # else the expected tensors would fill the memory
        raise ConfigError(
            f"manifest.json has {len(manifest.tensors)} tensors for {model.num_layers} layers"
        )
    settings = None if state.weights_only else build_saved_optimizer_config(state.adjustable)
    buffers = ((f"{BUFFERS}/{spec.name}", spec.shape) for spec in list_buffer_specs(model))
    for name, shape in (*_list_tensors(list_parameter_specs(model), settings), *buffers):
        record = manifest.tensors.get(name)
        if record is None or record.shape != shape:
            found = "no tensor" if record is None else f"shape {record.shape}"
            raise ConfigError(f"manifest.json has {found} of {name}, the model needs {shape}")


def _list_tensors(
    parameters: Iterable[ParameterSpec], settings: OptimizerConfig | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor that a run saves; only weights without settings."""
    for parameter in parameters:
        name, shape = parameter.name, parameter.shape
        yield f"weights/{name}", shape
        if settings is not None:
            yield f"updates/{name}", ()
            shapes = compute_saved_shapes(settings, parameter.role, shape)
            yield from ((f"{tensor.name}/{name}", shape) for tensor, shape in shapes.items())


def find_weights_key(state: TrainingState, path: StoragePath, uses_ema: bool = False) -> str:
    """Return the key of the tensors in a checkpoint that take the place of the weights.

    These weights are evaluated, exported and sampled from. They are the weights that training
    updates, or the average of an optimizer that has one. Checkpoints with weights only contain
    them as the weights.

    Args:
        state: State of the checkpoint.
        path: Location of the checkpoint, for messages.
        uses_ema: Select the moving average of optimizer.ema_decay.

    Raises:
        ConfigError: The checkpoint has no moving average.
    """
    name = state.adjustable.get("optimizer.name", OptimizerConfig.name)
    average = None
    if not state.weights_only and ("optimizer", name) in list_registered():
        average = find_average(run_identity.build_saved_optimizer_config(state.adjustable))
    if uses_ema and average is not EMA:
        reason = "contains weights only" if state.weights_only else "was saved without one"
        raise ConfigError(
            f"ema=true needs the moving average of the weights, and {path} {reason}; remove it, or "
            "train with optimizer.ema_decay, for example 0.999"
        )
    return WEIGHTS if average is None or (average is EMA and not uses_ema) else average.name
