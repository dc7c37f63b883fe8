"""Master weights: copies of the parameters that the optimizer updates in another dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hlat.engine.native.step_random_bits import StepRandomBits
from hlat.precision.stochastic_rounding import StochasticRounder


class MasterWeights:
    """Uninitialized master copies of the updated rows of parameters.

    Attributes:
        tensors: Master weights by parameter name.

    Args:
        updated_params: Updated rows of the model's parameters.
        dtype: Dtype of the copies.
        random_bits: Random bits for stochastic rounding; None: round to nearest.
        compiled: Round with TorchInductor.
    """

    def __init__(
        self,
        updated_params: Mapping[str, Tensor],
        dtype: torch.dtype,
        random_bits: StepRandomBits | None,
        compiled: bool,
    ) -> None:
        self._updated_params, self._random_bits = updated_params, random_bits
        self._rounder = StochasticRounder(compiled)
        self.tensors = {
            name: torch.empty_like(param, dtype=dtype) for name, param in updated_params.items()
        }

    def copy_to_model(self) -> None:
        """Round the master weights into the model; repeated calls give identical results."""
        for name, param in self._updated_params.items():
            if self._random_bits is None:
                param.copy_(self.tensors[name])
            else:
                bits = self._random_bits.get_copy_bits(name)
                self._rounder.copy_rounded_(param, self.tensors[name], bits)
