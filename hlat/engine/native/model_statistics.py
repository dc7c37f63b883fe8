"""Statistics of the modules of all ranks over a training step."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.distributed.device_mesh import ParallelMesh
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import compute_step_metrics, get_statistics_size
from hlat.model.mlp_spec import StepMetricValue
from hlat.model.step_statistics import StepStatistics


class ModelStatistics:
    """Statistics of the layers of this rank, reduced over ranks.

    A data-parallel rank adds up its micro batches. Tensor-parallel ranks compute the same values,
    and pipeline ranks those of other layers.
    """

    def __init__(
        self,
        parts: Iterable[Decoder],
        model: ModelConfig,
        mesh: ParallelMesh,
        device: torch.device,
    ) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self._size = get_statistics_size(model)
        self._modules = {
            int(layer): module
            for part in parts
            for layer, block in part.layers.items()
            for module in block.modules()
            if isinstance(module, StepStatistics)
        }

    def start_step(self) -> None:
        """Set all statistics to zero."""
        for module in self._modules.values():
            module.start_step(self._device)

    def update_buffers(self, skip: Tensor) -> None:
        """Update the buffers that depend on the counts of the global batch, without host sync.

        If the bool scalar `skip` is true, they stay bit-identical.
        """
        modules = [one for one in self._modules.values() if one.update_buffers is not None]
        if not modules:
            return
        counts = torch.stack([one.counts for one in modules if one.counts is not None])
        self._mesh.dp.all_reduce(counts)
        for module, of_module in zip(modules, counts, strict=True):
            assert module.update_buffers is not None
            module.update_buffers(of_module, skip)

    def compute_metrics(self) -> dict[str, StepMetricValue]:
        """Wait for the device and return the metrics of the newest step; all ranks call it."""
        if self._size is None:
            return {}
        num_layers, (num_counts, num_sums) = self._model.num_layers, self._size
        counts = torch.zeros(num_layers, num_counts, dtype=torch.int64, device=self._device)
        sums = torch.zeros(num_layers, num_sums, device=self._device)
        for layer, module in self._modules.items():
            if module.counts is not None and module.sums is not None:
                counts[layer], sums[layer] = module.counts, module.sums
        for tensor in (counts, sums):
            self._all_reduce(tensor)
        return compute_step_metrics(self._model, counts.tolist(), sums.tolist())

    def _all_reduce(self, tensor: Tensor) -> None:
        self._mesh.dp.all_reduce(tensor)
        self._mesh.pp.all_reduce(tensor)
