"""Environment variables of the Neuron compiler and runtime.

The available variables depend on the SDK release, which the configuration pins. A variable that the
pinned release does not support is an error rather than silently ignored on the device.
"""

import re

from hlat.config.compiler import CompilerConfig
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.precision import Dtype, PrecisionConfig, RoundingMode

_LAST_RELEASE_WITH_XLA_BF16 = [2, 24]
"""torch-xla 2.8 removed XLA_USE_BF16 and XLA_DOWNCAST_BF16 (Neuron appnote
migration-from-xla-downcast-bf16)."""


_REMOVED_VARIABLES = {
    # Neuron appnote migration-from-xla-downcast-bf16; announcements of SDK 2.24 and 2.25.
    "XLA_USE_BF16": (
        [2, 25],
        "was removed",
        "remove it and set precision=bf16_sr, which casts the model to bf16",
    ),
    "XLA_DOWNCAST_BF16": (
        [2, 25],
        "was removed",
        "remove it and set precision=mixed, which selects the fp32 tensors",
    ),
    # Neuron appnote introducing-pytorch-2-x: PyTorch 2.5 is part of SDK 2.21.
    "BUCKET_CAP_MB": (
        [2, 21],
        "was renamed",
        "set compiler.environment.ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",
    ),
    # Neuron runtime release notes of SDK 2.31.
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": (
        [2, 31],
        "has no effect",
        "remove it, there is no replacement",
    ),
}
"""First release without a variable, the change, and what to do instead."""

_DEFECTIVE_RELEASES = dict.fromkeys(
    ("2.33", "2.33.0"),
    # Release notes of SDK 2.33.1.
    "can hang in a race between DMA engines; use compiler=neuron_2_33, which pins 2.33.1",
)
"""Defect of a release, and what to do instead."""

_ALLOWED_VARIABLE = re.compile(
    r"(?:NEURON|XLA|FI|NCCL|OFI_NCCL|CCOM)_[A-Z0-9_]+"  # Neuron, XLA, libfabric, collectives
    r"|ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB|BUCKET_CAP_MB|MALLOC_ARENA_MAX"
)
_CODE_VARIABLE = re.compile(r"LIBRARY|PLUGIN|TUNER|WRAPPER|_PATH$|_LIB$|_CONF_FILE$")
"""Parts of the names of variables whose values are libraries or programs to load."""

_VARIABLES_SET_BY_KEYS = {
    "NEURON_CC_FLAGS": "compiler.cc_flags",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "precision.rounding",
}


_UNSUPPORTED_VARIABLES = {
    # torch_xla/_internal/rendezvous.py
    "XLA_USE_DUMMY_STORE": "removes the store through which process groups over host memory connect"
}


def build_neuron_environment(
    compiler: CompilerConfig, precision: PrecisionConfig
) -> dict[str, str]:
    """Return the environment variables of a training process; empty without a pinned SDK.

    The precision sets stochastic rounding, and under SDK 2.24 and older also the XLA dtype of
    floats: XLA_USE_BF16 casts float and double to bf16, XLA_DOWNCAST_BF16 float to bf16 and double
    to fp32.

    Raises:
        ConfigError: The SDK is not of the form 2.28, or a variable may load code.
    """
    if compiler.neuron_sdk is None:
        return {}
    if (release := compiler.neuron_release) is None:
        raise ConfigError(*find_compiler_problems(compiler))
    raise_config_errors(find_forbidden_variables(compiler))
    stochastic = precision.rounding is RoundingMode.stochastic
    variables = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1" if stochastic else "0"}
    if compiler.cc_flags:
        variables["NEURON_CC_FLAGS"] = " ".join(compiler.cc_flags)
    if release <= _LAST_RELEASE_WITH_XLA_BF16 and precision.compute_dtype is Dtype.bf16:
        variables["XLA_DOWNCAST_BF16" if _has_fp32(precision) else "XLA_USE_BF16"] = "1"
    return variables | compiler.environment


def find_compiler_problems(compiler: CompilerConfig) -> list[str]:
    """Return the settings that the pinned SDK does not support, with key, release and remedy."""
    sdk = compiler.neuron_sdk
    if sdk is None:
        settings = {"cc_flags": compiler.cc_flags, "environment": compiler.environment}
        return [
            f"compiler.{key} is set, but compiler.neuron_sdk=null, so it has no effect; pin an "
            "SDK, such as 2.28"
            for key, setting in settings.items()
            if setting
        ]
    if (release := compiler.neuron_release) is None:
        return [
            f"compiler.neuron_sdk={sdk} is not a release of the Neuron SDK; use major.minor, such "
            "as 2.28"
        ]
    problems = find_forbidden_variables(compiler)
    if sdk in _DEFECTIVE_RELEASES:
        problems.append(f"compiler.neuron_sdk={sdk} {_DEFECTIVE_RELEASES[sdk]}")
    for name in compiler.environment:
        since, change, remedy = _REMOVED_VARIABLES.get(name, ([], "", ""))
        if since and release >= since:
            problems.append(
                f"compiler.environment.{name} {change} in Neuron SDK {'.'.join(map(str, since))}, "
                f"and compiler.neuron_sdk={sdk}; {remedy}"
            )
        elif name in _VARIABLES_SET_BY_KEYS:
            key = _VARIABLES_SET_BY_KEYS[name]
            problems.append(f"compiler.environment.{name} follows from {key}; set {key} instead")
        elif reason := _UNSUPPORTED_VARIABLES.get(name):
            problems.append(f"compiler.environment.{name} {reason}; remove it")
    return problems


def find_forbidden_variables(compiler: CompilerConfig) -> list[str]:
    """Return an error for each variable that could make a process load code."""
    return [
        f"compiler.environment.{name} is not allowed in a configuration, since it may load code; "
        "allowed are variables of Neuron, XLA, libfabric and NCCL (NEURON_*, XLA_*, FI_*, NCCL_*) "
        "that name no library; set others in the shell before you start hlat"
        for name in compiler.environment
        if not _ALLOWED_VARIABLE.fullmatch(name) or _CODE_VARIABLE.search(name)
    ]


def _has_fp32(precision: PrecisionConfig) -> bool:
    """Return True if a recipe with bf16 matmuls uses fp32 for any tensor or operator."""
    dtypes = (
        *(precision.param_dtype, precision.grad_dtype, precision.grad_accum_dtype),
        *(precision.reduce_dtype, precision.optimizer_state_dtype, precision.master_weight_dtype),
    )
    return Dtype.fp32 in dtypes or bool(precision.fp32_operators)
