"""Views of fused weights as canonical (Hugging Face) parameters.

Views map both ways without a copy, so reading and writing cannot disagree.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.parameter_spec import RowRange


def iter_canonical_views(
    model: ModelConfig, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the canonical name and a view of each parameter in unsharded tensors.

    The elements of a view in row-major order are those of the canonical tensor:
    `view.reshape(shape)` reads it, `view.copy_(canonical.view(view.shape))` writes it.
    """
    parameters = {parameter.name: parameter for parameter in list_module_parameters(model)}
    for name, tensor in tensors.items():
        for row_range, view, _ in iter_row_views(parameters[name].rows, tensor):
            yield row_range.name, view


def iter_row_views(
    row_ranges: Iterable[RowRange], tensor: Tensor
) -> Iterator[tuple[RowRange, Tensor, int]]:
    """Yield the fewest possible views of a tensor that consists of canonical rows.

    Yields:
        Canonical rows, a view with their elements in row-major order, and the view's first row in
        the tensor.
    """
    runs: dict[str, list[_StridedBlocks]] = {}
    start = 0
    for row_range in row_ranges:
        of_name = runs.setdefault(row_range.name, [])
        if not (of_name and of_name[-1].try_append(start, row_range)):
            of_name.append(_StridedBlocks(start, row_range))
        start += row_range.num_rows
    for run in (run for of_name in runs.values() for run in of_name):
        yield run.row_range, run.build_view(tensor), run.start


class _StridedBlocks:
    """Blocks of equal size and distance that contain consecutive canonical rows."""

    def __init__(self, start: int, row_range: RowRange) -> None:
        self.start, self.row_range = start, row_range
        self._block_size, self._stride = row_range.num_rows, 0

    def try_append(self, start: int, row_range: RowRange) -> bool:
        """Append a block and return True if it continues the pattern."""
        num_rows = self.row_range.num_rows
        num_blocks = num_rows // self._block_size
        stride = start - self.start if num_blocks == 1 else self._stride
        if (
            row_range.start != self.row_range.start + num_rows
            or row_range.num_rows != self._block_size
            or start != self.start + num_blocks * stride
        ):
            return False
        num_rows += row_range.num_rows
        self.row_range = replace(self.row_range, num_rows=num_rows)
        self._stride = stride
        return True

    def build_view(self, tensor: Tensor) -> Tensor:
        num_blocks = self.row_range.num_rows // self._block_size
        if num_blocks == 1:
            return tensor.narrow(0, self.start, self._block_size)
        span = tensor.narrow(0, self.start, (num_blocks - 1) * self._stride + self._block_size)
        return span.unfold(0, self._block_size, self._stride).movedim(-1, 1)
