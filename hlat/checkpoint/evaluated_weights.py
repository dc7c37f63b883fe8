"""Selection of the weights of a checkpoint that are evaluated, exported and sampled from.

They are the weights that training updates, or an average of them in the optimizer's state.
"""

from hlat.checkpoint.training_state import TrainingState
from hlat.config import run_identity
from hlat.config.components import list_registered
from hlat.config.config_errors import ConfigError
from hlat.config.optimizer import OptimizerConfig
from hlat.optim.optimizer_spec import EMA, find_average
from hlat.storage.storage_path import StoragePath

WEIGHTS = "weights"
"""Key of the weights, where `weights/<parameter>` is a tensor."""


def find_weights_key(state: TrainingState, path: StoragePath, uses_ema: bool = False) -> str:
    """Return the key of the tensors in a checkpoint that take the place of the weights.

    They are the average of an optimizer that has one. Checkpoints with weights only contain them as
    the weights.

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
