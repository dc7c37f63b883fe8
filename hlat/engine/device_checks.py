"""Checks of a device and its links against known results.

Every expected value is an integer that is exact in every dtype, computed on the host. A single
wrong element is therefore a fault of the device or a link, never a rounding error.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.config.engine_capabilities import STOCHASTIC_ROUNDING_DEVICES
from hlat.config.mfu import compute_link_bandwidth
from hlat.config.run import Config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.engine import graph_extraction
from hlat.engine.interface import DeviceReport, LinkReport

_PATTERN_PERIOD = 64
"""Period of the rows of a matrix; a power of two, like the matrix sizes."""
_MATMULS_PER_SYNC = 8
"""Matmuls between two synchronizations with the device."""
_MIN_TIMED_ROUNDS = 3
"""Timed rounds of matmuls at least: a device that compiles in the background delays one of them."""
_NUM_DISTINCT_VALUES = 7
"""Distinct elements of a contribution; it divides no packet size, so that lost packets show."""
_NUM_ALL_REDUCES = 4
"""All-reduces per axis; the first one connects, the fastest is reported."""
_NUM_CASTS = 1 << 16
"""Casts that measure the rounding mode: the standard deviation of the share is 0.13%."""
_GATHER_NUMEL = 1 << 18
"""Elements of each contribution gathered at a time."""


@dataclass(frozen=True)
class BurnInConfig:
    """Sizes of the matrices and of an all-reduce in elements, and the duration of the matmuls."""

    matrix_size: int
    duration_s: float
    all_reduce_numel: int


_CPU_BURN_IN = BurnInConfig(256, 0.02, 1 << 18)
_ACCELERATOR_BURN_IN = BurnInConfig(4096, 1.0, 1 << 24)


@dataclass(frozen=True)
class DeviceContext:
    """Device and communication of an engine.

    Attributes:
        device: Device of this process.
        dtype: Dtype of matmuls.
        axes: Mesh axes over the links of the devices, by name.
        mark_step: Executes the pending graph of a lazy device.
        supports_send_recv: True if two ranks of an axis can exchange tensors without the others.
        rounding_dtypes: Torch's dtypes of fp32 and bf16 on this device.
    """

    device: torch.device
    dtype: torch.dtype
    axes: Mapping[str, MeshAxis]
    mark_step: Callable[[], object] = lambda: None
    supports_send_recv: bool = True
    rounding_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.bfloat16)


def run_device_checks(config: Config, context: DeviceContext) -> DeviceReport:
    """Check this process's device, then its links along each axis."""
    device = context.device
    free_bytes, total_bytes = _get_memory_info(device)
    num_matmuls, num_wrong, flops_per_s = run_burn_in(device, context.dtype, context.mark_step)
    return DeviceReport(
        device=str(device),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        num_products=num_matmuls,
        num_wrong=num_wrong,
        flops_per_s=flops_per_s,
        rounded_up_share=measure_rounded_up_share(context),
        links=[
            _check_axis(name, axis, context, config)
            for name, axis in context.axes.items()
            if axis.size > 1
        ],
    )


def run_burn_in(
    device: torch.device, dtype: torch.dtype, mark_step: Callable[[], object] = lambda: None
) -> tuple[int, int, float]:
    """Compare every element of repeated matmuls; return matmuls, wrong elements and FLOP/s.

    The first round compiles the graphs of the others and is not timed. The fastest round counts.
    """
    burn_in = _get_burn_in_config(device)
    matrices = build_matmul_problem(burn_in.matrix_size)
    host = [torch.from_numpy(array).to(dtype) for array in matrices]
    a, b, expected = (tensor.to(device) for tensor in host)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    count, fastest_s, total_s = 0, math.inf, 0.0
    while total_s < burn_in.duration_s or count <= _MIN_TIMED_ROUNDS * _MATMULS_PER_SYNC:
        start = time.perf_counter()
        for _ in range(_MATMULS_PER_SYNC):
            result = _matmul(a, b)
            wrong += (result != expected).sum()
            mark_step()  # otherwise a compiler merges equal matmuls
        num_wrong = int(wrong)
        if count:
            seconds = time.perf_counter() - start
            total_s, fastest_s = total_s + seconds, min(fastest_s, seconds)
        count += _MATMULS_PER_SYNC
    # A faulty device may also compare incorrectly, so the last result is compared on the host
    num_wrong = max(num_wrong, int((result.cpu() != host[2]).sum()))
    return count, num_wrong, _MATMULS_PER_SYNC * 2 * burn_in.matrix_size**3 / fastest_s


def measure_rounded_up_share(context: DeviceContext) -> float | None:
    """Return the share of casts of 1 + 2^-10 to bf16 that a device rounds up.

    The spacing of bf16 at 1 is 2^-7: rounding to nearest rounds none up, stochastic rounding one in
    eight. None without stochastic rounding in hardware, or without fp32 on the device.
    """
    fp32, bf16 = context.rounding_dtypes
    if context.device.type not in STOCHASTIC_ROUNDING_DEVICES or fp32 is bf16:
        return None
    rounded = torch.full((_NUM_CASTS,), 1 + 2**-10, dtype=fp32).to(context.device).to(bf16)
    context.mark_step()
    return float((rounded.cpu().float() > 1).float().mean())


def build_matmul_problem(size: int) -> tuple[NDArray[np.float32], ...]:
    """Return two square matrices of small integers and their product.

    The matrices are periodic in both directions, so the product is too and follows from one period
    in integers. It fits bf16's 8 bits: the sums of a period are below 256, and the number of
    periods is a power of two.
    """
    first, second = np.random.default_rng(0).integers(-3, 4, (2, _PATTERN_PERIOD))
    index = np.add.outer(np.arange(_PATTERN_PERIOD), np.arange(_PATTERN_PERIOD)) % _PATTERN_PERIOD
    a, b, num_periods = first[index], second[index], size // _PATTERN_PERIOD
    blocks = (a, b, a @ b * num_periods)
    return tuple(np.tile(block, (num_periods, num_periods)).astype(np.float32) for block in blocks)


def _get_burn_in_config(device: torch.device) -> BurnInConfig:
    return _CPU_BURN_IN if device.type == "cpu" else _ACCELERATOR_BURN_IN


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _check_axis(name: str, axis: MeshAxis, context: DeviceContext, config: Config) -> LinkReport:
    device = context.device
    numel = _get_burn_in_config(device).all_reduce_numel
    contribution = torch.from_numpy(build_contribution(axis.rank, numel)).to(device)
    num_wrong, bytes_per_s = _time_all_reduce(axis, contribution, context.mark_step)
    expected = compute_link_bandwidth(config.hardware, axis.ranks)
    minimum = 0.0 if expected is None else expected * config.recovery.min_speed_share
    is_slow = context.supports_send_recv and axis.any(bytes_per_s < minimum, device)
    is_wrong = axis.any(num_wrong > 0, device) and not graph_extraction.is_extracting_graphs()
    context.mark_step()
    return LinkReport(
        axis=name,
        ranks=[*axis.ranks],
        num_wrong=num_wrong,
        wrong_pairs=_find_wrong_pairs(axis, contribution) if is_wrong else [],
        bytes_per_s=bytes_per_s,
        expected_bytes_per_s=expected,
        slow_pairs=_find_slow_pairs(axis, contribution, config) if is_slow else [],
    )


def build_contribution(rank: int, numel: int) -> NDArray[np.float32]:
    """Return a rank's operand of the all-reduce; ranks differ in every element."""
    values = (np.arange(_NUM_DISTINCT_VALUES) + rank) % _NUM_DISTINCT_VALUES
    return np.resize(values, numel).astype(np.float32)


def _time_all_reduce(
    axis: MeshAxis, contribution: Tensor, mark_step: Callable[[], object]
) -> tuple[int, float]:
    """Return the wrong elements of several all-reduces and the bytes/s of the fastest.

    A lazy device executes each all-reduce in one graph, which the first one compiles.
    The bandwidth is that of each link of a ring: 2 (n - 1) / n of the bytes (NCCL tests,
    doc/PERFORMANCE.md).
    """
    numel, num_wrong, seconds = contribution.numel(), 0, float("inf")
    periods = [build_contribution(rank, _NUM_DISTINCT_VALUES) for rank in range(axis.size)]
    expected = torch.from_numpy(np.resize(np.sum(periods, axis=0), numel))
    for _ in range(_NUM_ALL_REDUCES):
        total = contribution.clone()
        start = time.perf_counter()
        axis.all_reduce(total)
        mark_step()
        total[:1].tolist()  # waits for the device
        seconds = min(seconds, time.perf_counter() - start)
        num_wrong += int((total.cpu() != expected).sum())
    num_bytes = contribution.element_size() * numel
    return num_wrong, 2 * (axis.size - 1) / axis.size * num_bytes / seconds


def _find_wrong_pairs(axis: MeshAxis, contribution: Tensor) -> list[list[int]]:
    """Return this rank paired with each rank (or itself) that sends a wrong contribution."""
    wrong = set()
    for start in range(0, contribution.numel(), _GATHER_NUMEL):
        gathered = axis.all_gather(contribution[start : start + _GATHER_NUMEL]).cpu()
        for rank, received in enumerate(gathered):
            expected = build_contribution(rank, start + len(received))[start:]
            if not torch.equal(received, torch.from_numpy(expected)):
                wrong.add(axis.ranks[rank])
    return [[axis.ranks[axis.rank], other] for other in sorted(wrong)]


def _find_slow_pairs(axis: MeshAxis, contribution: Tensor, config: Config) -> list[list[int]]:
    """Return this rank and each of its two ring neighbors with a slow link."""
    slow = []
    for pair in _build_ring_pairs(axis.size):
        if axis.rank not in pair:
            continue
        peer, seconds = sum(pair) - axis.rank, float("inf")
        for _ in range(_NUM_ALL_REDUCES):
            start = time.perf_counter()
            axis.send_recv(contribution, peer)[:1].tolist()  # waits for the device
            seconds = min(seconds, time.perf_counter() - start)
        ranks = [axis.ranks[index] for index in pair]
        expected = compute_link_bandwidth(config.hardware, ranks)
        bytes_per_s = contribution.element_size() * contribution.numel() / seconds
        if expected is not None and bytes_per_s < expected * config.recovery.min_speed_share:
            slow.append(ranks)
    return slow


def _build_ring_pairs(size: int) -> list[list[int]]:
    """Return all pairs of ring neighbors in an order with concurrency and without deadlock."""
    pairs = [sorted((i, (i + 1) % size)) for i in range(size if size > 2 else 1)]
    last = [pairs.pop()] if len(pairs) % 2 else []
    return pairs[::2] + pairs[1::2] + last


def _get_memory_info(device: torch.device) -> tuple[int | None, int | None]:
    """Return the free and total bytes of an accelerator that reports them."""
    if device.type == "cpu":
        return None, None
    try:
        return torch.accelerator.get_memory_info(device)
    except (AttributeError, RuntimeError, NotImplementedError):  # depends on release and backend
        return None, None
