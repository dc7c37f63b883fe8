"""Canonical parameters of unsharded models."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.model.canonical_views import iter_row_views
from hlat.model.decoder_spec import list_module_parameters


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
