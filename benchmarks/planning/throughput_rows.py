"""Published rows of throughput as inputs of the planner.

throughput_rows.csv states the source of each row at a commit. A row is planned if hlat has a model
of its kind; `EXCLUDED` has the reasons why others are not.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hlat.config.batch import BatchConfig
from hlat.config.compose import compose_config
from hlat.config.hardware import HardwareConfig
from hlat.config.model import ModelConfig
from hlat.config.parallelism import ActivationCheckpointing, ParallelismConfig, PipelineSchedule
from hlat.config.precision import Dtype, PrecisionConfig
from hlat.config.resolve import convert_to_dataclasses
from hlat.config.run import Config
from hlat.model.attention_spec import LayerType
from hlat.model.mlp_spec import Activation

FILE = Path(__file__).with_name("throughput_rows.csv")
EXCLUDED = {
    "R070": "its expert-parallel ranks include tensor-parallel ones, which hlat does not support",
    "R071": "DeepSeek-V3 has latent attention, which hlat does not implement",
}
"""Rows that cannot be planned, with the reason."""
MOE_MODELS = {
    "R068": "gpt-oss-120b",
    "R069": "Qwen3-30B-A3B",
    "R070": "Qwen3-235B-A22B",
    **dict.fromkeys(("R218", "R219"), "KempnerForge MoE, 8 experts"),
    **dict.fromkeys(("R220", "R221"), "KempnerForge MoE, 16 experts"),
}
"""Rows without shape: the model of `build_moe_model`."""


@dataclass(frozen=True)
class Device:
    """Preset of hlat for a device of the rows, and what differs from it.

    Attributes:
        preset: Choice of the group hardware.
        overrides: Fields of HardwareConfig.
    """

    preset: str
    overrides: dict[str, Any]


GB300_PEAKS = {"bf16": 2500, "fp8": 5000, "fp4": 15000, "fp32": 80}
"""Dense peaks of GB300 in TFLOP/s (NVIDIA GB300 NVL72 data sheet)."""
DEVICES = {
    "A100-40": Device("a100_p4d", {"network_gbit_per_s": 1600}),
    "A100-80": Device("a100_hgx", {}),
    "H100-80": Device("h100_hgx", {}),
    "H100-96-500W": Device("h100_96gb", {}),
    "H200-141": Device("h200_hgx", {}),
    "B200": Device("b200_hgx", {}),
    "B200 power-limited": Device("b200_hgx", {}),
    "B200/GB200 (184 GiB)": Device("gb200_nvl72", {}),
    "GB200": Device("gb200_nvl72", {}),
    "GB300": Device("gb200_nvl72", {"peak_tflops": GB300_PEAKS}),
    "trn1-core": Device("trn1_32xl", {}),
}
"""Devices by their name in the file. llm-foundry states 1600 Gb/s per node of eight A100; the other
networks are those of the presets, 400 Gb/s per GPU where the source does not state one."""


@dataclass(frozen=True)
class ThroughputRow:
    """A published row.

    Attributes:
        row_id: Identifier in the file.
        framework: Framework without its release.
        source: File and commit of the publication, which is the unit of weights.
        model: Name of the model.
        device: Name of the device in the file.
        num_devices: Devices of the run.
        is_fitted: True if the constants may be fitted to the row.
        published: Tokens per second and device.
        layout: Text of the parallel degrees.
        precision: Precision in the words of the source.
        config: Configuration of hlat with the same work per rank. Context parallelism, which hlat
            does not have, is a shorter sequence on more data-parallel ranks.
        context_parallel: Ranks that share a sequence.
        has_float8: True if the matmuls of layers have float8 or float4 operands.
        has_block_scales: True for microscaling formats.
        is_compiled: True for torch.compile or the fused kernels of TransformerEngine.
        checkpointing: Recomputation in the words of the source.
        is_tensor_parallel_asynchronous: True if the source states asynchronous tensor parallelism.
    """

    row_id: str
    framework: str
    source: str
    model: str
    device: str
    num_devices: int
    is_fitted: bool
    published: float
    layout: str
    precision: str
    config: Config
    context_parallel: int
    has_float8: bool
    has_block_scales: bool
    is_compiled: bool
    checkpointing: str
    is_tensor_parallel_asynchronous: bool


def load_rows() -> list[ThroughputRow]:
    """Return the rows that can be planned."""
    return [_build_row(record) for record in load_records() if record["id"] not in EXCLUDED]


def load_records() -> list[dict[str, str]]:
    """Return all rows of the file."""
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def _build_row(record: dict[str, str]) -> ThroughputRow:
    degrees = {key: int(record[key] or 1) for key in ("tp", "pp", "vp", "cp", "ep")}
    names = {"dp": "dp", "tp": "tp", "pp": "pp", "vp": "virtual stages", "cp": "cp", "ep": "ep"}
    sizes = {"dp": int(record["dp"]), **degrees}
    layout = ", ".join(
        f"{names[key]} {size}" for key, size in sizes.items() if size > 1 or key == "dp"
    )
    return ThroughputRow(
        row_id=record["id"],
        framework=parse_framework(record["framework"]),
        source=record["source"],
        model=MOE_MODELS.get(record["id"], record["model"]),
        device=record["device"],
        num_devices=int(record["devices"]),
        is_fitted=record["split"] == "fit",
        published=float(record["tokens_per_s_per_device"]),
        layout=f"{record['sharding'].split(' ')[0]}, {layout}",
        precision=record["precision"],
        config=_build_config(record, degrees),
        context_parallel=degrees["cp"],
        has_float8=any(name in record["precision"] for name in ("fp8", "float8", "nvfp4")),
        has_block_scales=record["precision"].startswith(("mxfp8", "nvfp4")),
        is_compiled=record["compiled"] != "no",
        checkpointing=record["recompute"],
        is_tensor_parallel_asynchronous="async TP" in record["notes"],
    )


def parse_framework(text: str) -> str:
    """Return the framework without its release."""
    if text.startswith("NxD"):
        return "NxD"
    return text.split(" ")[0]


def _build_config(record: dict[str, str], degrees: dict[str, int]) -> Config:
    base, context = _load_base(), degrees["cp"]
    num_devices, dp = int(record["devices"]), int(record["dp"]) * context
    batch = BatchConfig(
        global_batch_size=int(record["global_batch"] or 4 * dp) * context,
        micro_batch_size=int(record["micro_batch"]),
        sequence_length=int(record["seq"]) // context,
    )
    return replace(
        base,
        model=_build_model(record),
        batch=batch,
        parallelism=_build_parallelism(record, degrees),
        precision=_build_precision(record),
        hardware=_build_hardware(record["device"], num_devices, int(record["devices_per_node"])),
        compiler=replace(base.compiler, torch_compile=record["compiled"] != "no"),
    )


def _build_parallelism(record: dict[str, str], degrees: dict[str, int]) -> ParallelismConfig:
    sharding, tp, stages = record["sharding"], degrees["tp"], degrees["vp"]
    checkpointing = ActivationCheckpointing.none
    if record["recompute"] == "full":
        checkpointing = ActivationCheckpointing.full
    elif record["framework"].startswith("NxD"):  # selective is Megatron's core attention there
        checkpointing = ActivationCheckpointing.selective
    zero = 3 if sharding.startswith("FSDP") else int("ZeRO-1" in sharding)
    if record["framework"].startswith("torchtitan") and degrees["pp"] > 1:
        zero = 1  # gathers and reduces once per step, torch/distributed/pipelining/stage.py
    schedule = PipelineSchedule.interleaved if stages > 1 else PipelineSchedule.one_f_one_b
    return ParallelismConfig(
        tp=tp,
        pp=degrees["pp"],
        ep=degrees["ep"],
        sequence_parallel=tp > 1
        and (record["sequence_parallel"] == "yes" or record["framework"] == "KempnerForge"),
        zero=zero,
        pipeline_schedule=schedule,
        stages_per_rank=stages,
        activation_checkpointing=checkpointing,
    )


def _build_hardware(device: str, num_devices: int, per_node: int) -> HardwareConfig:
    """Return a preset with the nodes of a row.

    The racks of GB200 are one node, since NVLink connects all their devices.
    """
    hardware = load_hardware(DEVICES[device].preset)
    if DEVICES[device].preset == "gb200_nvl72":
        per_node = num_devices
    network = (hardware.network_gbit_per_s or 0.0) / (hardware.processes_per_node or 1)
    overrides: dict[str, Any] = {
        "network_gbit_per_s": network * per_node,
        **DEVICES[device].overrides,
    }
    per_node = min(per_node, num_devices)
    return replace(
        hardware, nodes=num_devices // per_node, processes_per_node=per_node, **overrides
    )


@cache
def load_hardware(preset: str) -> HardwareConfig:
    """Return a choice of the group hardware."""
    return convert_to_dataclasses(compose_config([f"hardware={preset}"])).hardware


@cache
def _load_base() -> Config:
    overrides = ["model=llama3_8b", "hardware=h100_p5", "parallelism=single"]
    return convert_to_dataclasses(compose_config(overrides))


@cache
def _load_precision(name: str) -> PrecisionConfig:
    return convert_to_dataclasses(compose_config([f"precision={name}"])).precision


def _build_precision(record: dict[str, str]) -> PrecisionConfig:
    """Return the recipe of a row: fp32 states, or bf16 where the source states it.

    llm-foundry sums gradients in bf16 (mixed_precision: PURE in its configurations). KempnerForge
    has parameters and states in bf16 and sums gradients in fp32 (distributed/parallel.py there).
    """
    if record["precision"] in ("bf16 (PURE)", "bf16+SR") or record["id"] == "R208":
        return _load_precision("bf16")
    mixed = _load_precision("mixed")
    if record["framework"] == "llm-foundry":
        return replace(mixed, reduce_dtype=Dtype.bf16)
    if record["framework"] == "KempnerForge":
        return replace(_load_precision("bf16"), reduce_dtype=Dtype.fp32)
    if record["framework"].startswith("NxD") and record["sharding"] == "ZeRO-0":
        return _load_precision("bf16")
    return mixed


def _build_model(record: dict[str, str]) -> ModelConfig:
    if record["id"] in MOE_MODELS:
        return build_moe_model(MOE_MODELS[record["id"]])
    base = _load_base().model
    return replace(
        base,
        name=record["model"],
        num_layers=int(record["layers"]),
        hidden_size=int(record["hidden_size"]),
        intermediate_size=int(record["ffn"]),
        num_attention_heads=int(record["heads"]),
        num_key_value_heads=int(record["kv_heads"]),
        vocab_size=int(record["vocab"]),
        tie_embeddings="tied embedding" in record["notes"],
        mlp=replace(base.mlp, activation=Activation(record["mlp"])),
    )


def build_moe_model(name: str) -> ModelConfig:
    """Return the shape of a sparse model.

    Sources: config.json of openai/gpt-oss-120b, Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B;
    configs/model/moe_small.toml of KempnerForge, whose factor 1.3 gives a width of 7168.
    """
    sizes = {
        "gpt-oss-120b": (36, 2880, 64, 8, 64, 201088, 128, 4, 2880),
        "Qwen3-30B-A3B": (48, 2048, 32, 4, 128, 151936, 128, 8, 768),
        "Qwen3-235B-A22B": (94, 4096, 64, 4, 128, 151936, 128, 8, 1536),
        "KempnerForge MoE, 8 experts": (24, 2048, 16, 4, 128, 128256, 8, 2, 7168),
        "KempnerForge MoE, 16 experts": (24, 2048, 16, 4, 128, 128256, 16, 2, 7168),
    }
    layers, hidden, heads, kv_heads, head_dim, vocab, experts, selected, width = sizes[name]
    base = _load_base().model
    moe = replace(base.mlp.moe, num_experts=experts, experts_per_token=selected)
    attention = replace(base.attention, head_dim=head_dim)
    if name == "gpt-oss-120b":
        pattern = [LayerType.sliding, LayerType.full]
        attention = replace(attention, sliding_window=128, layer_pattern=pattern)
    return replace(
        base,
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        attention=attention,
        mlp=replace(base.mlp, kind="moe", moe=replace(moe, intermediate_size=width)),
    )
