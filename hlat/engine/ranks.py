"""Ranks that agree on something axis by axis, so that what it costs one does not grow with all."""

import json
from typing import Any

import torch

from hlat.engine.axis import Axis
from hlat.parallelism.group import Group


class Ranks(Group):
    """All ranks that some axes span, the last of which varies fastest in their order."""

    def __init__(self, axes: list[Axis]) -> None:
        self._axes = axes
        self.leads = all(axis.rank == 0 for axis in axes)

    def broadcast(self, message: bytes | None) -> bytes:
        """Along the first axis, then from there along the next."""
        for i, axis in enumerate(self._axes):
            if all(later.rank == 0 for later in self._axes[i + 1 :]):
                message = axis.broadcast(message if axis.rank == 0 else None)
        assert message is not None
        return message

    def collect(self, value: Any) -> list[Any]:
        """Along the last axis, then from its first ranks along the one before."""
        values = [value]
        for i, axis in reversed([*enumerate(self._axes)]):
            if all(later.rank == 0 for later in self._axes[i + 1 :]):
                messages = axis.collect(json.dumps(values).encode())
                values = [value for message in messages for value in json.loads(message)]
        return values if self.leads else []

    def any(self, flag: bool) -> bool:
        """The largest of ones and zeros."""
        found = torch.tensor([int(flag)])
        for axis in self._axes:
            axis.max_(found)
        return bool(found)
