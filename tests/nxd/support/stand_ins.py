"""Stand-ins for closed packages of AWS, so neuronx_distributed can be imported without them.

Its training modules import its inference modules, which import kernels and compilers of the Neuron
SDK. A stand-in has only a name; calling it raises an error.
"""

import os
import sys
from collections import namedtuple
from enum import Enum
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace
from typing import Any

import torch


class NeuronOnlyError(NotImplementedError):
    """Error of a call to a kernel or a compiler of the Neuron SDK."""


def get_platform_target() -> str:
    """Return the chip for which NxD orders ranks and key/value heads: trn1, trn2 or trn3."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")


class CollectivesConfig:
    """Source and target ranks of context-parallel groups: the next rank on a ring."""

    def __init__(self, replica_groups: list[list[int]]) -> None:
        self.rank_src_tgt_pairs = {
            rank: [[one, other] for one, other in zip(group, group[1:] + group[:1], strict=True)]
            for group in replica_groups
            for rank in group
        }


def jit(function: Any = None, **options: Any) -> Any:
    """Decorate a kernel, as `@jit`, `jit(kernel, mode=...)` or `jit()(kernel)`."""
    return jit if function is None else _stand_in(f"the kernel {function.__name__}")


SYMBOLS: dict[str, list[str]] = {
    "libneuronxla": ["neuron_xla_compile"],
    "neuronxcc.nki": ["jit"],
    "neuronxcc.nki._pre_prod_kernels": [
        *("ActFnType", "ExpertAffinityScaleMode", "RouterActFnType"),
    ],
    "neuronxcc.nki._pre_prod_kernels.collectives": ["CollectivesConfig"],
    "neuronxcc.nki._private.private_api": ["inline_asm_bytes", "sendrecv"],
    "neuronxcc.nki._private_kernels.blockwise_mm": ["BlockShardStrategy", "SkipMode"],
    "neuronxcc.nki.compiler": ["skip_middle_end_transformations"],
    "neuronxcc.nki.compiler.backends.neuron.dimensions": ["CCPipeline", "VNC"],
    "neuronxcc.nki.isa": [],
    "neuronxcc.nki.kernels.attention": ["FlashConfig"],
    "neuronxcc.nki.language": ["bfloat16", "int32", "nc", "ndarray", "tile_size"],
    "neuronxcc.nki.nccl": [],
    "neuronxcc.nki.typing": ["tensor"],
    "nki": ["jit"],
    "nki.language": ["bfloat16", "float4_e2m1fn_x4", "ndarray"],
    "nkilib.core.moe.moe_cte.moe_cte_utils": ["BlockShardStrategy", "SkipMode"],
    "nkilib.core.moe_block.moe_block_tkg": ["moe_block_tkg"],
    "nkilib.core.subkernels.find_nonzero_indices": ["find_nonzero_indices"],
    "nkilib.core.subkernels.indexed_flatten": ["indexed_flatten"],
    "nkilib.core.utils.common_types": ["ActFnType", "ExpertAffinityScaleMode", "RouterActFnType"],
    "nkilib.core.utils.tensor_view": ["TensorView"],
    "torch_neuronx": ["BucketModelConfig"],
    "torch_neuronx.experimental.profiler.v2_x.custom_op_name": ["hlo_debug"],
    "torch_neuronx.proto.metaneff_pb2": ["MetaNeff"],
    "torch_neuronx.pyhlo.hlo_pb2": ["HloComputationProto", "HloInstructionProto", "HloModuleProto"],
    "torch_neuronx.pyhlo.xla_data_pb2": [],
    "torch_neuronx.utils": ["get_platform_target"],
    "torch_neuronx.utils.utils": ["SUPPORTED_TYPES", "get_platform_target"],
    "torch_neuronx.xla_impl.base": ["xla_call"],
    "torch_neuronx.xla_impl.bucket_trace": ["create_bucket_model"],
    "torch_neuronx.xla_impl.ops": ["nki_jit"],
    "torch_neuronx.xla_impl.structure": ["Packer"],
    "torch_neuronx.xla_impl.torchscript": ["replace_weights"],
    "torch_neuronx.xla_impl.trace": [
        *("HloArtifacts", "NeffArtifacts", "XLA_DTYPE_TO_METANEFF_DTYPE", "generate_neff"),
        *("get_hlo_computation_by_id", "get_hlo_root_instruction", "get_torch_dtype"),
        "hlo_entry_computation",
    ],
}
"""Module -> symbols that NxD 0.17 (SDK 2.28) or 0.18 (2.29) imports from it.
libneuronxla has no libneuronpjrt_path, by which torch_xla would detect Neuron."""

ANSWERS: dict[str, Any] = {
    "ActFnType": Enum("ActFnType", ["GELU", "SiLU", "Swish"]),
    "BlockShardStrategy": Enum("BlockShardStrategy", ["HI_LO", "PING_PONG"]),
    "CollectivesConfig": CollectivesConfig,
    "ExpertAffinityScaleMode": Enum("ExpertAffinityScaleMode", ["NO_SCALE", "POST_SCALE"]),
    "RouterActFnType": Enum("RouterActFnType", ["SIGMOID", "SOFTMAX"]),
    "SUPPORTED_TYPES": (),
    "SkipMode": namedtuple("SkipMode", ["skip_token", "skip_weight"]),
    "XLA_DTYPE_TO_METANEFF_DTYPE": {},
    "get_platform_target": get_platform_target,
    "jit": jit,
    "nki_jit": jit,
    "skip_middle_end_transformations": jit,
}
"""Values of the symbols that NxD uses during import or training; all others only have a name."""


def _stand_in(what: str) -> type:
    """Return a class that raises on construction; NxD uses some in annotations."""

    def raise_error(self: Any, *arguments: Any, **keywords: Any) -> None:
        raise NeuronOnlyError(f"{what} is part of the Neuron SDK and does not run here")

    return type(what.rpartition(".")[2], (), {"__init__": raise_error})


def _module(name: str) -> Any:
    """Return the module of this name; create it and its parents if missing."""
    if name not in sys.modules:
        module = module_from_spec(ModuleSpec(name, None, is_package=True))
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, module)
    return sys.modules[name]


def install() -> None:
    """Register the stand-ins, so this process can import neuronx_distributed."""
    for name, symbols in SYMBOLS.items():
        module = _module(name)
        for symbol in symbols:
            stand_in = _stand_in(f"{name}.{symbol}")
            setattr(module, symbol, ANSWERS.get(symbol, stand_in))
    scripted = ("LayoutTransformation", "SPMDModel")
    torch.classes.neuron = SimpleNamespace(**{name: _stand_in(name) for name in scripted})
