"""What engine=nxd asks of the other groups: what neuronx-distributed has no way to do."""

from collections.abc import Iterator

from hlat.config.engine import Backend
from hlat.config.parallelism import PipelineSchedule
from hlat.config.precision import Rounding
from hlat.config.run import Config

_LAST_SDK = (2, 31)
"""Neuron ended PyTorch/XLA training in SDK 2.32 (its announcements)."""


def nxd(config: Config) -> Iterator[str]:
    """All that neuronx-distributed cannot execute, and what only it can."""
    if config.engine.name is not Backend.nxd:
        if config.precision.copies_drift:
            yield (
                "precision.copies_drift=true lets NxD's hardware round copies apart, and "
                f"engine.name={config.engine.name.value} keeps them equal; set it to false"
            )
        return
    yield from layout(config)
    yield from recipe(config)
    yield from _device(config)


def layout(config: Config) -> Iterator[str]:
    """What NxD does not cut."""
    layout, model = config.parallelism, config.model
    if layout.zero > 1:
        yield f"parallelism.zero={layout.zero} is not in NxD; use 0 or 1, or engine=native"
    if layout.pipeline_schedule is not PipelineSchedule.one_f_one_b:
        yield (
            f"parallelism.pipeline_schedule={layout.pipeline_schedule.value} hangs NxD's evaluation"
            "; use one_f_one_b, or engine=native"
        )
    if model.tie_embeddings:
        yield (
            "model.tie_embeddings=true is not executed by engine=nxd; use engine=native, or false"
        )
    if layout.tp > 0 and model.vocab_size % layout.tp:
        fits = -(-model.vocab_size // layout.tp) * layout.tp
        yield (
            f"parallelism.tp={layout.tp} does not divide model.vocab_size={model.vocab_size}, as "
            f"NxD's embedding needs; set model.vocab_size={fits}, or use engine=native"
        )
    if config.data.document_mask:
        yield (
            "data.document_mask=true needs a mask that flows with the tokens, and NxD's pipeline "
            "has a constant one; set it to false, or use engine=native"
        )


def recipe(config: Config) -> Iterator[str]:
    """What NxD keeps with ZeRO-1 only, or does not keep."""
    precision, zero = config.precision, config.parallelism.zero
    name, weights = f"precision={precision.name}", precision.weights
    kept = (precision.accumulation, precision.master_weights)
    if zero == 0 and any(dtype not in (None, weights) for dtype in kept):
        yield (
            f"{name} keeps more than {weights.value}, which only NxD's ZeRO-1 optimizer does; set "
            "parallelism.zero=1"
        )
    if precision.accumulation is not precision.reduction:
        yield f"{name}: NxD adds up micro batches and ranks in one dtype; name the same two"
    if precision.copies_drift and precision.rounding is not Rounding.stochastic:
        yield f"precision.copies_drift=true needs stochastic rounding, and {name} has none"


def _device(config: Config) -> Iterator[str]:
    compiler, device = config.compiler, config.engine.device
    if device not in ("xla", "auto"):
        yield f"engine.device={device}: engine=nxd has PyTorch/XLA's device only; use xla"
    if compiler.neuron_sdk is None:
        if config.precision.rounding is Rounding.stochastic:
            yield (
                "precision.rounding=stochastic is the hardware's with engine=nxd, and "
                "compiler.neuron_sdk=null sets no mode; use compiler=neuron_2_28 or another pin"
            )
        return
    numbers = compiler.neuron_sdk.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) > _LAST_SDK:
        yield (
            f"compiler.neuron_sdk={compiler.neuron_sdk} has no NxD training, which ended with "
            "2.31; use compiler=neuron_2_28, or engine=native on trn2"
        )
