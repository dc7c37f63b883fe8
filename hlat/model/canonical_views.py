"""Canonical parameters as views into the tensors that hold them.

A view maps one to the other without a copy, so reading and writing use the same mapping and cannot
disagree.
"""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from hlat.config.model import Model
from hlat.model.coalesced import Rows, rows


def canonical_views(model: Model, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each canonical parameter as a view into the whole tensors that hold it.

    Args:
        model: Shape of the model.
        tensors: By parameter name of llama.Llama: the parameters, or tensors with as many rows such
            as their gradients or moments, for the whole model or some of its layers.

    Yields:
        Canonical name and a view. The view's elements in row-major order are those of the canonical
        tensor: `view.reshape(shape)` reads it, `view.copy_(canonical.view(view.shape))` writes it.
    """
    for name, tensor in tensors.items():
        for part, view, _ in views(rows(model, name, len(tensor)), tensor):
            yield part.name, view


def views(parts: Iterable[Rows], tensor: Tensor) -> Iterator[tuple[Rows, Tensor, int]]:
    """What a tensor holds, in as few views as there can be.

    Args:
        parts: What its rows are, in order.
        tensor: Of any strides.

    Yields:
        Canonical rows, a view whose elements in row-major order are theirs, and the row of the
        tensor where it begins.
    """
    runs: dict[str, list[_Run]] = {}
    begin = 0
    for part in parts:
        of_name = runs.setdefault(part.name, [])
        if not (of_name and of_name[-1].takes(begin, part)):
            of_name.append(_Run(begin, part))
        begin += part.count
    for run in (run for of_name in runs.values() for run in of_name):
        yield run.rows, run.view(tensor), run.begin


class _Run:
    """Blocks of equally many rows at equal distances that continue one another."""

    def __init__(self, begin: int, part: Rows) -> None:
        self.begin, self.rows = begin, part
        self._block, self._distance = part.count, 0

    def takes(self, begin: int, part: Rows) -> bool:
        """Take the next block if it continues the run."""
        taken = self.rows.count // self._block
        distance = begin - self.begin if taken == 1 else self._distance
        if (
            part.first != self.rows.first + self.rows.count
            or part.count != self._block
            or begin != self.begin + taken * distance
        ):
            return False
        self.rows = Rows(part.name, self.rows.first, self.rows.count + part.count)
        self._distance = distance
        return True

    def view(self, tensor: Tensor) -> Tensor:
        blocks = self.rows.count // self._block
        if blocks == 1:
            return tensor.narrow(0, self.begin, self._block)
        spanned = tensor.narrow(0, self.begin, (blocks - 1) * self._distance + self._block)
        return spanned.unfold(0, self._block, self._distance).movedim(-1, 1)
