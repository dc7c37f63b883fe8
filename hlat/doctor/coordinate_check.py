"""Coordinate check of a parametrization: activations over a ladder of widths and depths.

If settings transfer, the changes of all activations by some updates have the same size at each
width and depth (arXiv 2203.03466, appendix D.1; for depth arXiv 2505.01618, section 4). The ladder
multiplies the sizes of the reduced model, which is the base, by 1, 2, 4 and 8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hlat.config.components import register_component, remove_components
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype, PrecisionConfig
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.parametrization_probe import EPS, find_faults
from hlat.doctor.reduced_config import to_single_process
from hlat.doctor.sampled_inputs import sample_batch, sample_documents
from hlat.engine.native.model_metrics import Record
from hlat.figures.size_figure import build_size_figure
from hlat.model.decoder import Decoder, DecoderLayer
from hlat.model.parametrization_spec import ParametrizationName

FACTORS = (1, 2, 4, 8)
"""Sizes of the ladder relative to the base."""
_PROBED_FACTOR = 4
_NUM_STEPS, _NUM_SEEDS = 6, 3
_MAX_SLOPE = 0.4
"""Largest power of the size to which the change of an activation may be proportional. Finite widths
and the noise of seeds give up to 0.3; a missing rule gives 0.5 to 2."""
_METRIC = "activations"
_FP32 = PrecisionConfig(
    name="fp32",
    param_dtype=Dtype.fp32,
    compute_dtype=Dtype.fp32,
    grad_dtype=Dtype.fp32,
    grad_accum_dtype=Dtype.fp32,
    reduce_dtype=Dtype.fp32,
    optimizer_state_dtype=Dtype.fp32,
)
FIGURE_FILE = "coordinates.png"


@dataclass(frozen=True)
class Ladder:
    """Changes of activations over the factors of a size.

    Attributes:
        axis: width or depth.
        changes: Mean over seeds of the change of each activation, by factor.
    """

    axis: str
    changes: Mapping[str, list[float]]

    def compute_slopes(self) -> dict[str, float]:
        """Return the power of the size to which each change is proportional."""
        factors = np.log2(FACTORS)
        return {
            name: float(np.polyfit(factors, np.log2(np.maximum(values, 1e-12)), 1)[0])
            for name, values in self.changes.items()
        }


def check_coordinates(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that changes of activations do not depend on the sizes over which settings transfer.

    The standard parametrization passes; its slopes are information.
    """
    rules = harness.config.model.parametrization.name
    ladders = [measure_ladder(harness, axis) for axis in ("width", "depth")]
    _save_figure(harness.config, ladders)
    slopes = {ladder.axis: ladder.compute_slopes() for ladder in ladders}
    described = "; ".join(
        f"{axis}: " + ", ".join(f"{name} {slope:+.2f}" for name, slope in by_name.items())
        for axis, by_name in slopes.items()
    )
    faults, problems = list[FaultLocation](), list[str]()
    for axis in _TRANSFERRED_AXES[rules]:
        for name, slope in slopes[axis].items():
            if not abs(slope) <= _MAX_SLOPE:
                faults.append(FaultLocation(name, axis))
                problems.append(f"the change of {name} is proportional to {axis}^{slope:.2f}")
    if rules is not ParametrizationName.standard:
        factors = dict.fromkeys(_TRANSFERRED_AXES[rules], _PROBED_FACTOR)
        with harness.with_config(scale_config(harness.config, factors, eps=EPS)) as probed:
            found = [*find_faults(probed)]
        faults = [*(FaultLocation(part, "rules") for part, _ in found), *faults]
        problems = [*(f"{part}: {text}" for part, text in found), *problems]
    numbers = {f"{axis} {name}": slope for axis, by in slopes.items() for name, slope in by.items()}
    yield build_result(
        "coordinates",
        faults,
        f"powers of the size in the changes of activations with {rules.value}: {described}",
        "; ".join(problems),
        **numbers,
    )


_TRANSFERRED_AXES: Mapping[ParametrizationName, tuple[str, ...]] = {
    ParametrizationName.standard: (),
    ParametrizationName.mup: ("width",),
    ParametrizationName.completep: ("width", "depth"),
}
"""Sizes over which the settings transfer."""


def measure_ladder(harness: EngineHarness, axis: str) -> Ladder:
    """Train the model at each factor of width or depth, and return the changes."""
    changes: dict[str, list[float]] = {}
    for factor in FACTORS:
        by_seed = [
            _measure_changes(harness, scale_config(harness.config, {axis: factor}, seed))
            for seed in range(_NUM_SEEDS)
        ]
        for name in by_seed[0]:
            values = [changes_of_seed[name] for changes_of_seed in by_seed]
            changes.setdefault(name, []).append(float(np.mean(values)))
    return Ladder(axis, changes)


def scale_config(
    config: Config, factors: Mapping[str, int], seed: int = 0, eps: float | None = None
) -> Config:
    """Return a configuration in fp32 on one process with multiples of width and depth.

    The model of `config` is the base.
    """
    config = to_single_process(config)
    model, optimizer = config.model, config.optimizer
    rules = model.parametrization
    base = replace(
        rules,
        base_width=None if rules.base_width is None else model.hidden_size,
        base_depth=None if rules.base_depth is None else model.num_layers,
        base_head_dim=None if rules.base_head_dim is None else model.head_dim,
    )
    model = _scale_width(replace(model, parametrization=base), factors.get("width", 1))
    model = replace(model, num_layers=model.num_layers * factors.get("depth", 1))
    return replace(
        config,
        model=model,
        run=replace(config.run, seed=config.run.seed + seed, init_seed=None, data_seed=None),
        precision=_FP32,
        optimizer=replace(optimizer, grad_clip=0.0, eps=eps or optimizer.eps),
    )


def _scale_width(model: ModelConfig, factor: int) -> ModelConfig:
    """Return a wider model: with larger heads if the base has a head size, else with more heads."""
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
    }
    head_dim, attention = model.head_dim, model.attention
    if model.parametrization.base_head_dim is not None:
        head_dim *= factor
    else:
        sizes["num_attention_heads"] = model.num_attention_heads
        sizes["num_key_value_heads"] = model.num_key_value_heads
    return replace(
        model,
        **{name: size * factor for name, size in sizes.items()},
        attention=replace(attention, head_dim=head_dim),
    )


def _measure_changes(harness: EngineHarness, config: Config) -> dict[str, float]:
    """Return the mean absolute change of each activation by some updates from initial weights."""
    with harness.with_config(config) as other:
        tokens = sample_batch(config)
        before = _capture_activations(other, tokens)
        for _ in range(_NUM_STEPS):
            other.train_step(tokens, config.optimizer.lr)
        after = _capture_activations(other, tokens)
    changes: dict[str, list[float]] = {}
    for name, activation in after.items():
        kind, _, _ = name.partition(".")
        changes.setdefault(kind, []).append(float((activation - before[name]).abs().mean()))
    return {kind: sum(values) / len(values) for kind, values in changes.items()}


def _capture_activations(harness: EngineHarness, tokens: NDArray[np.int32]) -> dict[str, Tensor]:
    """Return the activations of a forward pass, by kind and layer."""
    _captured.clear()
    documents = sample_documents(harness.config, tokens)
    register_component("tracking", _METRIC, "Activations.", implementation=_observe)
    try:
        harness.engine.compute_metrics([_METRIC], PackedSequences(tokens, documents))
    finally:
        remove_components({("tracking", _METRIC)})
    return dict(_captured)


def _observe(part: Decoder, record: Record) -> Iterator[RemovableHandle]:
    """Capture the outputs of the embedding, of attention and MLP in each layer, and the logits."""
    assert part.embed_tokens is not None
    yield part.embed_tokens.register_forward_hook(partial(_capture, "embedding"))
    for name, layer in part.layers.items():
        assert isinstance(layer, DecoderLayer)
        yield layer.self_attn.register_forward_hook(partial(_capture, f"attention.{name}"))
        yield layer.mlp.register_forward_hook(partial(_capture, f"mlp.{name}"))
        yield layer.register_forward_hook(partial(_capture, f"residual stream.{name}"))
    yield part.register_forward_hook(_capture_logits)


def _capture(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _captured[name] = output.detach().float().cpu().clone()


def _capture_logits(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    assert isinstance(module, Decoder)
    _captured["logits"] = (output.detach() @ module.lm_head_weight.detach().T).float().cpu()


_captured: dict[str, Tensor] = {}
"""Activations of the last forward pass by kind, and layer."""


def _save_figure(config: Config, ladders: Sequence[Ladder]) -> None:
    """Save a figure of the changes over the factors in the directory of doctor.json."""
    panels = [
        (
            f"{ladder.axis} relative to the base",
            {f"{name} ({slope:+.2f})": ladder.changes[name] for name, slope in slopes.items()},
        )
        for ladder in ladders
        for slopes in [ladder.compute_slopes()]
    ]
    title = f"parametrization {config.model.parametrization.name.value}"
    figure = build_size_figure(title, f"mean change after {_NUM_STEPS} updates", FACTORS, panels)
    directory = Path(config.run.root) / str(config.run.name)
    directory.mkdir(parents=True, exist_ok=True)
    figure.save(directory / FIGURE_FILE)
