"""Planned step time of published rows, for given constants.

`Constants` are those that fit_devices.py determines from the fitted rows. The others are in
hlat/plan/device_efficiency.yaml.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.planning.throughput_rows import ThroughputRow
from hlat.plan.achieved_speed import compute_achieved_speed, get_efficiency
from hlat.plan.framework_traits import FrameworkTraits
from hlat.plan.hardware_efficiency import UNCALIBRATED_INTERVAL, HardwareEfficiency
from hlat.plan.step_time import StepTime, compute_step_time

FIT = Path(__file__).with_name("device_fit.json")
MIN_FITTED_ROWS = 5
BEST_MATMUL = {"a100": 0.869, "h100": 0.803, "h200": 0.803, "b200": 0.776, "gb200": 0.729}
"""Highest measured share of the bf16 peak in matmuls: stas00/ml-engineering,
compute/accelerator/README.md, maximum achievable matmul FLOPS."""
BEST_FLOAT8 = {"h100": 0.709, "h200": 0.734, "b200": 0.763, "gb200": 0.723}
"""The same with float8 operands."""
TRANSFORMER_ENGINE = ("NeMo", "Megatron-Bridge")
"""Frameworks with TransformerEngine, whose attention is that of cuDNN."""
FLASH_ATTENTION_2 = {"a100": 0.6, "h100": 0.35, "h200": 0.35, "b200": 0.35, "gb200": 0.35}
"""Share of the bf16 peak of FlashAttention-2: 50 to 73% on A100 (arXiv 2307.08691, abstract), 35%
on H100 (2407.08608, abstract); the same is assumed on B200."""
CUDNN_ATTENTION_TIME = 0.55
"""Time of cuDNN's attention relative to FlashAttention-2 on H100, assumed: FlashAttention-3, which
has about the same speed, is 1.5 to 2.0 times as fast (2407.08608, section 4.1)."""
PER_OPERATOR_MATMULS = 0.5
"""Share of the matmuls that torchtitan's selective checkpointing per operator computes again: it
saves every second one (torchtitan, activation_checkpoint.py)."""
SEPARATE_GATHERS = 7 / 4
"""Tensor-parallel collectives of KempnerForge in each direction, relative to two gathers and two
reductions: queries, keys, values, gate and up gather their input separately
(kempnerforge/distributed/tensor_parallel.py at 01b461a)."""


@dataclass(frozen=True)
class Constants:
    """Constants to fit.

    Attributes:
        sustained: Speed of matmuls in training relative to the best measured one.
        a100: The same of A100 relative to other GPUs.
        h100_500w: The same of H100 with a limit of 500 W.
        float8: The same of float8 relative to bf16.
        attention: Speed of attention relative to the published one.
        compiled_passes: As in HardwareEfficiency, as the following.
        eager_passes: Without torch.compile.
        overlap: Overlap of data-parallel collectives.
        link: Achieved fraction of links.
        network: Achieved fraction of the network.
        tensor_overlap: Overlap of asynchronous tensor parallelism.
        factors: Time of computation by framework, relative to torchtitan.
    """

    sustained: float = 0.85
    a100: float = 1.0
    h100_500w: float = 0.87
    float8: float = 1.0
    attention: float = 1.0
    compiled_passes: float = 4.0
    eager_passes: float = 10.0
    overlap: float = 0.7
    link: float = 0.39
    network: float = 0.8
    tensor_overlap: float = 0.7
    factors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceFit:
    """Result of fit_devices.py.

    Attributes:
        constants: Fitted constants.
        intervals: Logarithm of the upper end of the 80% interval of a step time, by device and by
            whether the framework has fitted rows.
        num_rows: Fitted rows by device and framework.
    """

    constants: Constants
    intervals: dict[str, dict[str, float]]
    num_rows: dict[str, dict[str, int]]

    def is_calibrated(self, row: ThroughputRow) -> bool:
        """Return True if device and framework have at least five fitted rows.

        Microscaling formats and experts are in no fitted row.
        """
        if row.has_block_scales or row.config.model.mlp.kind == "moe":
            return False
        of_device = self.num_rows.get(row.config.hardware.device or "", {})
        of_framework = sum(counts.get(row.framework, 0) for counts in self.num_rows.values())
        return min(sum(of_device.values()), of_framework) >= MIN_FITTED_ROWS

    def get_interval(self, row: ThroughputRow) -> tuple[float, float]:
        """Return the 80% interval of a step time relative to the predicted one."""
        device = row.config.hardware.device or ""
        if device.startswith("trn"):
            return get_efficiency(row.config).interval
        if not self.is_calibrated(row):
            return UNCALIBRATED_INTERVAL
        size = self.intervals[device]["known framework"]
        return math.exp(-size), math.exp(size)


def load_fit() -> DeviceFit:
    """Return the result of the last fit."""
    found = json.loads(FIT.read_text())
    constants = Constants(**found["constants"])
    return DeviceFit(constants, found["intervals"], found["rows"])


def plan_row(row: ThroughputRow, constants: Constants) -> StepTime:
    """Return the planned time of a step of a row."""
    efficiency, traits = build_efficiency(row, constants), build_traits(row, constants)
    speed = compute_achieved_speed(row.config, efficiency, traits)
    return compute_step_time(row.config, speed, traits)


def compute_throughput(row: ThroughputRow, step_s: float) -> float:
    """Return the tokens per second and device of a row."""
    return row.config.batch.tokens_per_step / (step_s * row.num_devices)


def build_efficiency(row: ThroughputRow, constants: Constants) -> HardwareEfficiency:
    """Return the constants of a row's device; those of trn1 are not fitted here."""
    efficiency, device = get_efficiency(row.config), row.config.hardware.device or ""
    if device.startswith("trn"):
        return efficiency
    chip = device.removesuffix("_500w")
    scale = constants.sustained * {
        "a100": constants.a100,
        "h100_500w": constants.h100_500w,
    }.get(device, 1.0)
    return replace(
        efficiency,
        compute=scale * BEST_MATMUL[chip],
        float8=scale * constants.float8 * BEST_FLOAT8.get(chip, 0.0) or None,
        attention=constants.attention * FLASH_ATTENTION_2[chip],
        compiled_passes=constants.compiled_passes,
        eager_passes=constants.eager_passes,
        overlap=constants.overlap,
        link=constants.link,
        network=constants.network,
    )


def build_traits(row: ThroughputRow, constants: Constants) -> FrameworkTraits:
    """Return the traits of a row's framework and run."""
    is_engine = row.framework in TRANSFORMER_ENGINE
    is_hopper = not (row.config.hardware.device or "").startswith(("a100", "trn"))
    per_operator = row.framework == "torchtitan" and row.checkpointing.startswith("selective")
    is_asynchronous = row.is_tensor_parallel_asynchronous or is_engine
    matmul_dtype = None
    if row.has_float8:
        matmul_dtype = "fp4" if row.precision.startswith("nvfp4") else "fp8"
    return FrameworkTraits(
        compute_factor=constants.factors.get(row.framework, 1.0),
        attention_factor=CUDNN_ATTENTION_TIME if is_engine and is_hopper else 1.0,
        matmul_dtype=matmul_dtype,
        context_parallel=row.context_parallel,
        recomputed_matmuls=PER_OPERATOR_MATMULS if per_operator else None,
        tensor_parallel_volume=SEPARATE_GATHERS if row.framework == "KempnerForge" else 1.0,
        has_fused_loss=row.framework == "llm-foundry",
        reduces_once=row.framework == "KempnerForge",
        tensor_parallel_overlap=constants.tensor_overlap if is_asynchronous else 0.0,
    )
