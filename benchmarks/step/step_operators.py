"""The operators of an eager step without autograd, and with inputs in the cache.

An eager step with the same losses calls these operators, unless fused ones with the same results
replace them. Each operator is repeated as often as a step calls it, so that all of its calls but
the first find their inputs in the cache. Views are not repeated. Nothing is trained.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.decoder_spec import count_parameters

if TYPE_CHECKING:
    from contestants import Settings


@dataclass(frozen=True)
class TensorSpec:
    """Argument of an operator."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def build(self) -> Tensor:
        """Return a tensor of ones, or of zeros if it has integers, which may be indices."""
        pairs = zip(self.shape, self.stride, strict=True)
        num_elements = 1 + sum((size - 1) * stride for size, stride in pairs)
        fill = 1.0 if self.dtype.is_floating_point else 0
        flat = torch.full((num_elements,), fill, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class OperatorCall:
    """Operator and its arguments."""

    operator: Callable[..., Any]
    structure: TreeSpec
    leaves: tuple[Any, ...]

    def build(self) -> Callable[[], Any]:
        """Return a function that calls the operator with tensors of the same layout."""
        leaves = [x.build() if isinstance(x, TensorSpec) else x for x in self.leaves]
        arguments, options = tree_unflatten(leaves, self.structure)
        return partial(self.operator, *arguments, **options)


class OperatorRecorder(TorchDispatchMode):
    """Counter of the operators that run within the context, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[OperatorCall] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if not func.is_view:
            leaves, structure = tree_flatten((args, options))
            self.counts[OperatorCall(func, structure, tuple(map(get_spec, leaves)))] += 1
        return func(*args, **options)


def get_spec(leaf: Any) -> Any:
    """Return the layout of a tensor, and other arguments unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    return TensorSpec(tuple(leaf.shape), leaf.stride(), leaf.dtype)


class OperatorStep:
    """Contestant that calls the operators of an eager step."""

    def __init__(self, settings: "Settings") -> None:
        config = settings.config
        self.num_parameters = count_parameters(config.model)
        with closing(NativeEngine()) as engine:
            engine.build(config)
            sequences = PackedSequences(settings.tokens())
            engine.train_step(sequences, 1e-4)  # allocates the state of the optimizer
            with OperatorRecorder() as recorder:
                engine.train_step(sequences, 1e-4)
        self.calls = [(call.build(), count) for call, count in recorder.counts.items()]

    @torch.no_grad()
    def step(self) -> None:
        for call, count in self.calls:
            for _ in range(count):
                call()

    def loss(self) -> None:
        return None


def open_trainer(settings: "Settings") -> OperatorStep:
    """Record the operators of a step."""
    return OperatorStep(settings)
