"""Metrics of extensions, which observe modules in a forward pass, and statistics of a step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hlat.config.components import get_implementation
from hlat.config.model import ModelConfig
from hlat.distributed.device_mesh import ParallelMesh
from hlat.distributed.object_group import ObjectGroup
from hlat.model.decoder import Decoder
from hlat.model.mlp_spec import StepMetricValue, get_mlp_spec
from hlat.model.step_statistics import StepStatistics

Record = Callable[[str, Tensor], None]
"""Adds the elements of a tensor to a mean, given its name within the metric."""
Observe = Callable[[Decoder, Record], Iterable[RemovableHandle]]
"""Registers forward hooks on the modules of a model part; the implementation of a metric."""


class MetricRecorder:
    """Sums of the observed values on this rank."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def record(self, metric: str, name: str, values: Tensor) -> None:
        """Add the elements of a tensor to the mean `<metric>/<name>`."""
        name, total = f"{metric}/{name}", values.detach().sum(dtype=torch.float32)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + values.numel()

    def gather_means(self, group: ObjectGroup) -> dict[str, float]:
        """Return the means over all ranks of the group on rank 0, else {}.

        A rank has some of the sequences, heads or layers; what several ranks observe counts once
        for each of them.
        """
        local = {name: [float(total), self._counts[name]] for name, total in self._sums.items()}
        sums: dict[str, list[float]] = {}
        for of_rank in group.gather_object(local):
            for name, (total, count) in of_rank.items():
                known = sums.setdefault(name, [0.0, 0])
                sums[name] = [known[0] + total, known[1] + count]
        return {name: total / max(1, count) for name, (total, count) in sums.items()}


@contextmanager
def observe_metrics(parts: Iterable[Decoder], names: Sequence[str]) -> Iterator[MetricRecorder]:
    """Observe forward passes of the model parts in the context; compiled layers run eagerly."""
    recorder = MetricRecorder()
    with ExitStack() as stack:
        for part in parts:
            for name in names:
                observe: Observe = get_implementation("tracking", name)
                for handle in observe(part, partial(recorder.record, name)):
                    stack.callback(handle.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield recorder


class ModelStatistics:
    """Statistics of the layers of this rank over a training step, reduced over ranks.

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
        self._size = get_mlp_spec(model).get_statistics_size(model)
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
            self._mesh.dp.all_reduce(tensor)
            self._mesh.pp.all_reduce(tensor)
        spec = get_mlp_spec(self._model)
        return spec.compute_step_metrics(self._model, counts.tolist(), sums.tolist())
