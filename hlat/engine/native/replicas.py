"""What data-parallel ranks do together: add up gradients, and share what each has updated.

Without ZeRO every rank gets the whole sum. With it a rank gets the sum of its own rows, updates
these and sends them to the others (Rajbhandari et al., arXiv 1910.02054, stage 1). Vectors are not
worth cutting. Stages 2 and 3 are in fully_sharded.py. A gradient is sent as soon as its last micro
batch has gone back, while the backward pass goes on.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hlat.engine.axis import Axis
from hlat.engine.native.gradients import watch


class Replicas:
    """The data-parallel axis as the weights see it."""

    def __init__(self, axis: Axis, zero: int) -> None:
        """Know which of the states of ZeRO's stages the ranks of an axis share."""
        self.axis = axis
        self.cuts = zero == 1 and axis.size > 1
        """Whether a rank updates some rows of each matrix that it holds."""
        self.shared = zero > 1 and axis.size > 1
        """Whether a rank holds some rows only, since torch's FSDP2 has cut everything before."""

    def padded(self, num_rows: int) -> int:
        """Rows that memory of a matrix needs, so that all ranks have equally many."""
        return self._step(num_rows) * self.axis.size if self.cuts else num_rows

    def own(self, shape: tuple[int, ...]) -> slice:
        """The rows of a tensor that this rank updates."""
        if not self.cuts or len(shape) == 1:
            return slice(0, shape[0])
        return self.share_of(shape[0])

    def share_of(self, num_rows: int) -> slice:
        """This rank's rows where all have equally many, but for the last; FSDP2 cuts alike."""
        step = self._step(num_rows)
        start = min(self.axis.rank * step, num_rows)
        return slice(start, min(start + step, num_rows))

    def counts(self, num_rows: int, own: slice) -> bool:
        """Whether this rank is to count rows of a tensor that it updates, in norms and saves."""
        return self.shared or own != slice(0, num_rows) or self.axis.rank == 0

    def share(self, memory: Tensor) -> None:
        """Fill the rows of a matrix that the other ranks have updated; memory is padded."""
        if self.cuts and memory.dim() > 1:
            parts = torch.unflatten(memory, 0, (self.axis.size, -1))
            self.axis.gather_into(memory, parts[self.axis.rank])

    def start_sum(self, gradient: Tensor) -> "Sum":
        """Begin to add up a gradient over ranks."""
        if self.shared:
            return Sum(gradient, None)
        if not self.cuts or gradient.dim() == 1:
            return Sum(gradient, self.axis.sum_(gradient, wait=False))
        missing = self.padded(len(gradient)) - len(gradient)
        if missing:
            gradient = torch.cat((gradient, gradient.new_zeros((missing, *gradient.shape[1:]))))
        every = torch.unflatten(gradient, 0, (self.axis.size, -1))
        own, work = self.axis.start_sum_and_scatter(every)
        rows = self.own((len(gradient) - missing, 1))
        return Sum(own[: rows.stop - rows.start], work)

    def _step(self, num_rows: int) -> int:
        return -(-num_rows // self.axis.size)


class Sum:
    """A sum that is being made."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> Tensor:
        """The sum, or this rank's rows of it."""
        if self._work is not None:
            self._work.wait()
        return self._tensor


class Reducer:
    """Starts the sum over ranks of each gradient when it is complete on this one."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        complete: Callable[[str], Tensor],
        start: Callable[[Tensor], Sum],
        num_micro_batches: int,
    ) -> None:
        """Watch matrices; whoever adds up micro batches watches them already.

        Args:
            weights: By parameter name.
            complete: The sum of a parameter's gradient over the micro batches, given its name.
            start: Begins a sum over ranks.
            num_micro_batches: Backward passes of a step.
        """
        self._names, self._complete, self._start = list(weights), complete, start
        self._num_micro_batches = num_micro_batches
        self._counts: dict[str, int] = {}
        self._started: dict[str, Sum] = {}
        self.close = watch(weights, self._count)

    def finish(self) -> dict[str, Tensor]:
        """The sums over ranks of a step, by parameter name."""
        for name in self._names:  # whose hooks were not called: a schedule added them up itself
            if name not in self._started:
                self._started[name] = self._start(self._complete(name))
        started, self._started, self._counts = self._started, {}, {}
        return {name: started[name].wait() for name in self._names}

    def _count(self, name: str, weight: Tensor) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        if self._counts[name] == self._num_micro_batches:
            self._started[name] = self._start(self._complete(name))
