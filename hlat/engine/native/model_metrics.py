"""Metrics of extensions, which observe modules during a forward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hlat.config.components import get_implementation
from hlat.distributed.object_group import ObjectGroup
from hlat.model.decoder import Decoder

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
