"""Examines a device and its links with numbers whose answers are known.

Every answer is an integer small enough to be exact in every dtype, and comes from the arithmetic of
the host. So one wrong element is a fault of the device or of what connects it, never of rounding.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.config.run import Config
from hlat.engine.axis import Axis
from hlat.engine.interface import Examination, Link
from hlat.hardware import link_bandwidth

_PERIOD = 64
"""Rows after which a factor repeats itself; a power of two, as the sizes are."""
_PRODUCTS_AT_ONCE = 8
"""Products between two looks at the clock, which wait for the device."""
_SUMMANDS = 7
"""Different elements of a contribution; no divisor of a packet, so that lost ones show."""
_SUMS = 4
"""Sums over an axis; the first one connects, the fastest counts."""
_GATHERED = 1 << 18
"""Elements of each contribution that are gathered at once."""


@dataclass(frozen=True)
class Effort:
    """How much a kind of device is asked for.

    Attributes:
        size: Rows and columns of the matrices.
        seconds: Time to multiply them for.
        numel: Elements of a sum.
    """

    size: int
    seconds: float
    numel: int


_CPU = Effort(256, 0.02, 1 << 18)
_ACCELERATOR = Effort(4096, 1.0, 1 << 24)


@dataclass(frozen=True)
class Machinery:
    """How an engine computes.

    Attributes:
        device: Of this process.
        dtype: Of matrix products.
        axes: Groups over the devices' own links, by axis.
        cut: Ends what is computed together, where operators are only put down at first.
        pairwise: Whether two ranks of an axis can send each other something while others do not.
    """

    device: torch.device
    dtype: torch.dtype
    axes: Mapping[str, Axis]
    cut: Callable[[], object] = lambda: None
    pairwise: bool = True


def examine(config: Config, machinery: Machinery) -> Examination:
    """Examine this process's device, then what connects it along each axis."""
    device = machinery.device
    free, total = _memory(device)
    num_products, num_wrong, flops_per_s = burn_in(device, machinery.dtype, machinery.cut)
    return Examination(
        device=str(device),
        free_bytes=free,
        total_bytes=total,
        num_products=num_products,
        num_wrong=num_wrong,
        flops_per_s=flops_per_s,
        links=[
            _examine_axis(name, axis, machinery, config)
            for name, axis in machinery.axes.items()
            if axis.size > 1
        ],
    )


def burn_in(
    device: torch.device, dtype: torch.dtype, cut: Callable[[], object] = lambda: None
) -> tuple[int, int, float]:
    """Multiply two matrices for a while, and compare every element of every product.

    Returns:
        Products, wrong elements in them, and FLOP/s.
    """
    effort = _effort(device)
    known = [torch.from_numpy(array).to(dtype) for array in problem(effort.size)]
    one, other, expected = (array.to(device) for array in known)
    product = _product(one, other)  # the first call may compile
    wrong, count = (product != expected).sum(), 1
    num_wrong, begun = int(wrong), time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < effort.seconds:
        for _ in range(_PRODUCTS_AT_ONCE):
            product = _product(one, other)
            wrong += (product != expected).sum()
            cut()  # or equal products would be computed once
        count += _PRODUCTS_AT_ONCE
        num_wrong = int(wrong)
    # A device that cannot multiply may not be able to compare either
    num_wrong = max(num_wrong, int((product.cpu() != known[2]).sum()))
    return count, num_wrong, (count - 1) * 2 * effort.size**3 / elapsed


def problem(size: int) -> tuple[NDArray[np.float32], ...]:
    """Two square matrices of small integers, and their product.

    They repeat themselves in both directions, so the product does too, and follows from one period
    in integers. Of bf16's 8 bits it needs no more: a period's sums stay below 256, and the number
    of periods is a power of two.
    """
    first, second = np.random.default_rng(0).integers(-3, 4, (2, _PERIOD))
    across = np.add.outer(np.arange(_PERIOD), np.arange(_PERIOD)) % _PERIOD
    one, other, repeats = first[across], second[across], size // _PERIOD
    blocks = (one, other, one @ other * repeats)
    return tuple(np.tile(block, (repeats, repeats)).astype(np.float32) for block in blocks)


def _effort(device: torch.device) -> Effort:
    return _CPU if device.type == "cpu" else _ACCELERATOR


def _product(one: Tensor, other: Tensor) -> Tensor:
    return one @ other


def _examine_axis(name: str, axis: Axis, machinery: Machinery, config: Config) -> Link:
    device = machinery.device
    own = torch.from_numpy(contribution(axis.rank, _effort(device).numel)).to(device)
    num_wrong, bytes_per_s = _sums(axis, own)
    expected = link_bandwidth(config.hardware, axis.ranks)
    least = 0.0 if expected is None else expected * config.recovery.min_speed_share
    seek = machinery.pairwise and _any(axis, bytes_per_s < least, device)
    return Link(
        axis=name,
        ranks=[*axis.ranks],
        num_wrong=num_wrong,
        wrong_pairs=_wrong_pairs(axis, own) if _any(axis, num_wrong > 0, device) else [],
        bytes_per_s=bytes_per_s,
        expected_bytes_per_s=expected,
        slow_pairs=_slow_pairs(axis, own, config) if seek else [],
    )


def contribution(rank: int, numel: int) -> NDArray[np.float32]:
    """What a rank of an axis adds to the sum; every rank something else in each place."""
    return np.resize((np.arange(_SUMMANDS) + rank) % _SUMMANDS, numel).astype(np.float32)


def _sums(axis: Axis, own: Tensor) -> tuple[int, float]:
    """Add up all contributions a few times; returns wrong elements and bytes/s of the fastest.

    The bandwidth is what a ring would have needed of each link: 2 (n - 1) / n of the bytes (NCCL
    tests, doc/PERFORMANCE.md).
    """
    numel, num_wrong, seconds = own.numel(), 0, float("inf")
    each = [contribution(rank, _SUMMANDS) for rank in range(axis.size)]
    expected = torch.from_numpy(np.resize(np.sum(each, axis=0), numel))
    for _ in range(_SUMS):
        total = own.clone()
        begun = time.perf_counter()
        axis.sum_(total)
        total[:1].tolist()  # waits for the device
        seconds = min(seconds, time.perf_counter() - begun)
        num_wrong += int((total.cpu() != expected).sum())
    size = own.element_size() * numel
    return num_wrong, 2 * (axis.size - 1) / axis.size * size / seconds


def _wrong_pairs(axis: Axis, own: Tensor) -> list[list[int]]:
    """This rank and each, or itself, whose contribution does not arrive here as it must."""
    wrong = set()
    for start in range(0, own.numel(), _GATHERED):
        every = axis.gather(own[start : start + _GATHERED]).cpu()
        for rank, arrived in enumerate(every):
            expected = contribution(rank, start + len(arrived))[start:]
            if not torch.equal(arrived, torch.from_numpy(expected)):
                wrong.add(axis.ranks[rank])
    return [[axis.ranks[axis.rank], other] for other in sorted(wrong)]


def _slow_pairs(axis: Axis, own: Tensor, config: Config) -> list[list[int]]:
    """Of this rank's two neighbours on the ring, those to whom its link is slow as well."""
    slow = []
    for pair in _ring(axis.size):
        if axis.rank not in pair:
            continue
        other, seconds = sum(pair) - axis.rank, float("inf")
        for _ in range(_SUMS):
            begun = time.perf_counter()
            axis.exchange(own, other)[:1].tolist()  # waits for the device
            seconds = min(seconds, time.perf_counter() - begun)
        ranks = [axis.ranks[place] for place in pair]
        expected = link_bandwidth(config.hardware, ranks)
        bytes_per_s = own.element_size() * own.numel() / seconds
        if expected is not None and bytes_per_s < expected * config.recovery.min_speed_share:
            slow.append(ranks)
    return slow


def _ring(size: int) -> list[list[int]]:
    """All pairs of neighbours, such that many talk at a time and nobody waits in a circle."""
    pairs = [sorted((i, (i + 1) % size)) for i in range(size if size > 2 else 1)]
    last = [pairs.pop()] if len(pairs) % 2 else []
    return pairs[::2] + pairs[1::2] + last


def _any(axis: Axis, flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the axis."""
    found = torch.tensor([int(flag)], device=device)
    axis.max_(found)
    return bool(found)


def _memory(device: torch.device) -> tuple[int | None, int | None]:
    """Free and total bytes of an accelerator that tells them."""
    if device.type == "cpu":
        return None, None
    try:
        return torch.accelerator.get_memory_info(device)
    except (AttributeError, RuntimeError, NotImplementedError):  # not every release and backend can
        return None, None
