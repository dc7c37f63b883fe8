"""Matmuls in bf16 on x86 CPUs without AVX-512, 10 to 100 times faster than those of torch.

oneDNN has bf16 kernels for AVX-512 and newer instructions only. On other x86 CPUs torch computes a
loop over elements. The kernels of this module cast the operands to fp32, which is exact, and round
the fp32 result to bf16 once, as a bf16 kernel with fp32 accumulation does.
"""

import platform
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

Kernel = Callable[..., Tensor]
_X86 = ("x86_64", "AMD64")
_MATMULS = ("mm", "bmm", "addmm", "baddbmm")


def has_bf16_matmul() -> bool:
    """Return True if torch has a bf16 matmul for this CPU that is not a loop over elements."""
    return platform.machine() not in _X86 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def add_bf16_matmuls() -> None:
    """Replace the CPU kernels of matmuls in bf16 if torch has slow ones for this CPU."""
    if not has_bf16_matmul():
        register_bf16_matmuls()


@cache
def register_bf16_matmuls() -> Library:
    """Replace the CPU kernels of matmuls in bf16, and keep those of other dtypes.

    Returns:
        The library, which owns the registrations.
    """
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in _MATMULS:
            fp32_kernel = get_kernel(f"aten::{name}", "CPU").call_boxed
            for overload in (name, f"{name}.out"):
                kernel = get_kernel(f"aten::{overload}", "CPU").call_boxed
                implementation = _wrap_kernel(kernel, fp32_kernel)
                library.impl(  # type: ignore[no-untyped-call]
                    overload, implementation, "CPU", with_keyset=True
                )
    return library


def _wrap_kernel(kernel: Kernel, fp32_kernel: Kernel) -> Kernel:
    """Return `kernel` with `fp32_kernel` for operands that are all bf16."""

    def compute(keyset: Any, *operands: Tensor, **options: Any) -> Tensor:
        if any(operand.dtype != torch.bfloat16 for operand in operands):
            return kernel(keyset, *operands, **options)
        out = options.pop("out", None)
        result = fp32_kernel(keyset, *(operand.float() for operand in operands), **options)
        return result.bfloat16() if out is None else out.copy_(result)

    return compute
