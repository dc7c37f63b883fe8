"""The environment that the Neuron compiler and runtime are started with, as a value.

Which variables exist depends on the SDK release. So the release is pinned in the configuration,
what the recipe of precision needs follows from the pin, and a variable that the pinned release has
dropped is refused by name instead of being ignored on the device.
"""

import re
from dataclasses import dataclass

from hlat.config.compiler import Compiler
from hlat.config.precision import Dtype, Precision, Rounding

_LAST_WITH_XLA_BF16 = (2, 24)
"""XLA_USE_BF16 and XLA_DOWNCAST_BF16 went with torch-xla 2.8 (Neuron appnote
migration-from-xla-downcast-bf16)."""


@dataclass(frozen=True)
class _Dropped:
    """A variable that releases from `since` on no longer have.

    Attributes:
        since: First SDK release, major and minor.
        change: What became of it, as the end of a sentence.
        instead: What to do.
    """

    since: tuple[int, int]
    change: str
    instead: str


_DROPPED = {
    # Neuron appnote migration-from-xla-downcast-bf16; announcements of SDK 2.24 and 2.25.
    "XLA_USE_BF16": _Dropped(
        (2, 25),
        "was removed",
        "drop it and set precision=bf16_sr, which makes the model bf16 itself",
    ),
    "XLA_DOWNCAST_BF16": _Dropped(
        (2, 25),
        "was removed",
        "drop it and set precision=mixed, which names the fp32 tensors itself",
    ),
    # Neuron appnote introducing-pytorch-2-x: PyTorch 2.5 came with SDK 2.21.
    "BUCKET_CAP_MB": _Dropped(
        (2, 21), "was renamed", "set compiler.environment.ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"
    ),
    # Neuron runtime release notes of SDK 2.31.
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": _Dropped(
        (2, 31), "has no effect", "drop it, nothing replaces it"
    ),
}

_OWNED = {
    "NEURON_CC_FLAGS": "compiler.cc_flags",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "precision.rounding",
}
"""Variables that another key sets."""


def environment(compiler: Compiler, precision: Precision) -> dict[str, str]:
    """Every variable that a training process starts with.

    Args:
        compiler: The pin, the flags, and further variables, which are passed on verbatim.
        precision: The recipe; it sets stochastic rounding, and under SDK 2.24 and older also the
            dtype XLA gives to floats: XLA_USE_BF16 maps float and double to bf16, XLA_DOWNCAST_BF16
            float to bf16 and double to fp32.

    Returns:
        Names and values; empty without a pin.

    Raises:
        ValueError: The pin is not of the form 2.28; `problems` says so first.
    """
    if compiler.neuron_sdk is None:
        return {}
    release = _release(compiler.neuron_sdk)
    if release is None:
        raise ValueError(_unknown_pin(compiler.neuron_sdk))
    stochastic = precision.rounding is Rounding.stochastic
    variables = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1" if stochastic else "0"}
    if compiler.cc_flags:
        variables["NEURON_CC_FLAGS"] = " ".join(compiler.cc_flags)
    if release <= _LAST_WITH_XLA_BF16 and precision.compute is Dtype.bf16:
        variables["XLA_DOWNCAST_BF16" if _keeps_fp32(precision) else "XLA_USE_BF16"] = "1"
    return variables | compiler.environment


def problems(compiler: Compiler) -> list[str]:
    """What the pinned SDK cannot do: one sentence each, naming the key, the pin and what to do."""
    if compiler.neuron_sdk is None:
        return _unpinned(compiler)
    release = _release(compiler.neuron_sdk)
    if release is None:
        return [_unknown_pin(compiler.neuron_sdk)]
    found = []
    for name in compiler.environment:
        dropped = _DROPPED.get(name)
        if dropped and release >= dropped.since:
            since = ".".join(map(str, dropped.since))
            found.append(
                f"compiler.environment.{name} {dropped.change} in Neuron SDK {since}, and "
                f"compiler.neuron_sdk={compiler.neuron_sdk}; {dropped.instead}"
            )
        elif name in _OWNED:
            found.append(f"compiler.environment.{name} follows from {_OWNED[name]}; set that")
    return found


def _release(pin: str) -> tuple[int, int] | None:
    """Major and minor of a pin such as 2.28 or 2.26.1."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", pin)
    return (int(match[1]), int(match[2])) if match else None


def _unknown_pin(pin: str) -> str:
    return (
        f"compiler.neuron_sdk={pin} is not a release of the Neuron SDK; "
        "write major.minor, such as 2.28"
    )


def _unpinned(compiler: Compiler) -> list[str]:
    """Settings that would be silently ignored."""
    return [
        f"compiler.{key} is set, but compiler.neuron_sdk=null, so nothing would read it; "
        "pin an SDK, such as 2.28"
        for key, setting in (("cc_flags", compiler.cc_flags), ("environment", compiler.environment))
        if setting
    ]


def _keeps_fp32(precision: Precision) -> bool:
    """Whether a recipe with bf16 products holds anything in fp32."""
    dtypes = (
        precision.weights,
        precision.gradients,
        precision.accumulation,
        precision.reduction,
        precision.optimizer_state,
        precision.master_weights,
    )
    return Dtype.fp32 in dtypes or bool(precision.fp32_operators)
