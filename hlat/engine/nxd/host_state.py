"""Weights and optimizer state of this rank in host memory, for the checkpoint store."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch_xla
from torch import Tensor

from hlat.config.precision import PrecisionConfig
from hlat.distributed.state_shard import StateShard
from hlat.engine.nxd.nxd_parameters import NxdParameters
from hlat.engine.state_shards import iter_state_shards
from hlat.model.parameter_spec import ParameterSpec
from hlat.precision.torch_dtypes import TORCH_DTYPES


class HostState:
    """State in host memory by parameter, from `iter_shards` until `copy_to_device`.

    Before the first step the state is zeros, and weights are to be filled.

    Args:
        params: Parameters on the device.
        specs: Parameter specs by canonical name.
        precision: Recipe with the dtypes of checkpoints.
        is_main_replica: True if this rank saves the rows that it updates.
    """

    def __init__(
        self,
        params: NxdParameters,
        specs: Mapping[str, ParameterSpec],
        precision: PrecisionConfig,
        is_main_replica: bool,
    ) -> None:
        self._params, self._specs, self._precision = params, specs, precision
        self._is_main_replica = is_main_replica
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._versions: dict[tuple[str, str], int] = {}
        self._is_initial = True

    def find_saved_names(self) -> set[str]:
        """Return the parameters of which this rank saves rows."""
        params = self._params.local_params.items()
        return {name for name, p in params if self._is_main_replica and p.shard.num_owned_rows}

    def iter_shards(
        self, names: Iterable[str], kept_names: Collection[str]
    ) -> Iterator[StateShard]:
        """Yield the shards of parameters, and keep the copies of some."""
        if not self._tensors:
            torch_xla.sync()  # otherwise each tensor compiles a separate graph
        for name in names:
            tensors = self._tensors.get(name) or self._copy_to_host(name)
            if name in kept_names and name not in self._tensors:
                self._tensors[name] = tensors
                self._versions |= _get_versions({name: tensors})
            shard = self._params.local_params[name].shard
            yield from iter_state_shards(tensors, shard, self._specs, self._is_main_replica)

    def copy_to_device(self) -> set[str]:
        """Copy changed tensors to the device and release all copies; return the changed keys."""
        versions, changed_keys = _get_versions(self._tensors), set()
        for (name, key), version in self._versions.items():
            if versions[name, key] != version:
                tensor = self._params.get_state(name)[key]
                tensor.copy_(self._tensors[name][key].to(tensor.dtype))
                changed_keys.add(key)
        self._tensors, self._versions, self._is_initial = {}, {}, False
        return changed_keys

    def _copy_to_host(self, name: str) -> dict[str, Tensor]:
        """Return the state of a parameter in the dtypes of its checkpoints."""
        precision, state = self._precision, self._params.get_state(name)
        dtypes = dict.fromkeys(state, TORCH_DTYPES[precision.optimizer_state_dtype])
        dtypes["weights"] = TORCH_DTYPES[precision.master_weight_dtype or precision.param_dtype]
        dtypes["step"] = torch.float32
        if self._is_initial:
            return {key: torch.zeros(state[key].shape, dtype=dtypes[key]) for key in state}
        return {key: state[key].to("cpu", copy=True).to(dtypes[key]) for key in state}


def _get_versions(tensors: Mapping[str, dict[str, Tensor]]) -> dict[tuple[str, str], int]:
    """Return torch's write counter of each tensor by name and key."""
    return {
        (name, key): tensor._version
        for name, by_key in tensors.items()
        for key, tensor in by_key.items()
    }
