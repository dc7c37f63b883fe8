"""Location of wrong gradients: the axis of the parallel layout that causes each error.

The gradient of a batch is the sum of those of its micro batches, which the reference computes
separately. For a wrong gradient, least squares gives the count of each micro batch of each
data-parallel rank in it. With two ranks (rows) of two micro batches (columns):

    [[1, 1], [2, 2]]    ranks differ: the reduction along dp is wrong
    [[1, 0], [1, 0]]    micro batches differ: the pipeline, or gradient accumulation, is wrong
    [[2, 2], [2, 2]]    all are equal: the axis is unknown

If the axis is unknown, or no such sum explains the gradient, the step is repeated with changed
configurations, each without one axis. An axis without which the gradient is correct is its cause.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.run import Config
from hlat.distributed.parameter_shards import count_kv_replicas
from hlat.doctor import reference_model, tolerances
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.gradient_errors import (
    ExactGradients,
    compute_relative_error,
    compute_relative_errors,
    sum_gradients,
)
from hlat.doctor.reduced_config import move_axis_to_dp, to_single_process
from hlat.doctor.sampled_inputs import FullTensors, build_masks, sample_batch, sample_documents
from hlat.model.parameter_spec import ParameterSpec

_COUNT_TOLERANCE = 0.1
"""Maximum difference between equal counts, from rounding."""


@dataclass(frozen=True)
class WrongGradient:
    """Wrong gradient of a parameter.

    `error` is the norm of the error, relative to the norm of the exact gradient. `axis` is empty
    while unknown. `counts` describes those of each micro batch; empty if no sum explains the error.
    """

    name: str
    error: float
    axis: str
    counts: str


def locate_wrong_gradients(
    harness: EngineHarness, gradients: FullTensors, exact: list[ExactGradients]
) -> list[WrongGradient]:
    """Return the wrong gradients with their axes on rank 0, the worst first; none on other ranks.

    `exact` contains the gradients of `compute_micro_batch_gradients`. All ranks call it.
    """
    wrong: list[WrongGradient] = (
        harness.run_on_rank0(lambda: _find_wrong_gradients(harness.config, gradients, exact)) or []
    )
    unknown = harness.broadcast_object([one.name for one in wrong if not one.axis])
    axes = _find_axes(harness, unknown)
    return [replace(one, axis=one.axis or axes[one.name]) for one in wrong]


def compute_micro_batch_gradients(
    config: Config, weights: FullTensors, tokens: NDArray[np.int32]
) -> tuple[list[ExactGradients], float]:
    """Return the exact gradients per data-parallel rank and micro batch, and the total loss."""
    dp, masks = config.parallelism.dp or 1, build_masks(config, sample_documents(config, tokens))
    num_targets = reference_model.count_targets(tokens, masks)
    results = [
        reference_model.compute_gradients(
            config.model, weights, tokens[rows], num_targets, masks.select_rows(rows)
        )
        for rank in range(dp)
        for rows in np.split(np.arange(rank, len(tokens), dp), config.num_micro_batches)
    ]
    return [gradients for _, gradients in results], sum(loss for loss, _ in results)


def _find_wrong_gradients(
    config: Config, gradients: FullTensors, exact: list[ExactGradients]
) -> list[WrongGradient]:
    """Return the wrong gradients, the worst first, with their axis if the counts show it."""
    tolerance, errors = tolerances.compute_gradient_tolerance(config), []
    for name, error in compute_relative_errors(gradients, sum_gradients(exact)).items():
        if error <= tolerance:
            continue
        basis = np.stack([part[name].ravel() for part in exact], axis=1)
        flat = gradients[name].ravel()
        counts, *_ = np.linalg.lstsq(basis, np.nan_to_num(flat.astype(np.float64)))
        residual = compute_relative_error(flat, basis @ counts)
        is_sum = residual <= tolerance * max(1, counts.max())
        axis, description = _explain_counts(config, counts) if is_sum else ("", "")
        errors.append(WrongGradient(name, error, axis, description))
    return sorted(errors, key=lambda error: -error.error)


def _explain_counts(config: Config, counts: NDArray[Any]) -> tuple[str, str]:
    """Return the axis along which counts differ, empty if all are equal, and their description."""
    table = counts.reshape(-1, config.num_micro_batches)
    axis, subject, shown = "", "every sequence counts", table.mean(keepdims=True)[0]
    if np.ptp(table.mean(1)) > _COUNT_TOLERANCE:
        axis, subject, shown = "dp", "sequences of data-parallel ranks count", table.mean(1)
    elif np.ptp(table.mean(0)) > _COUNT_TOLERANCE:
        axis = "pp" if config.parallelism.pp > 1 else "accumulation"
        subject, shown = "micro batches count", table.mean(0)
    return axis, f": {subject} {', '.join(f'{abs(n):.3g}' for n in shown.round(2))} times"


def _find_axes(harness: EngineHarness, names: list[str]) -> dict[str, str]:
    """Return for each wrong gradient the axis without which it is correct; model: without any.

    The axis is "compiler" if the gradient is correct without compilation.
    """
    config = harness.config
    if not names or not config.compiler.torch_compile:
        return _find_parallel_axes(harness, config, names)
    eager = replace(config, compiler=replace(config.compiler, torch_compile=False))
    wrong = find_wrong_names(harness, eager)
    axes = {name: "compiler" for name in names if name not in wrong}
    return axes | _find_parallel_axes(harness, eager, [name for name in names if name in wrong])


def _find_parallel_axes(harness: EngineHarness, config: Config, names: list[str]) -> dict[str, str]:
    """Return the axis of the layout for each gradient that is wrong with a configuration."""
    if not names:
        return {}
    if config.num_processes == 1:
        return dict.fromkeys(names, "model")
    model_axes = [axis for axis in ("tp", "pp") if getattr(config.parallelism, axis) > 1]
    if not harness.can_rebuild:
        return dict.fromkeys(names, "+".join([*model_axes, "dp"]))
    wrong = find_wrong_names(harness, to_single_process(config))
    axes = {name: "model" for name in names if name in wrong}
    for axis in model_axes:
        wrong = find_wrong_names(harness, move_axis_to_dp(config, axis))
        axes |= {name: axis for name in names if name not in axes and name not in wrong}
    axes = {name: axes.get(name, "dp") for name in names}
    axes |= _find_faults_of_experts(harness, config, [n for n in names if axes[n] == "dp"])
    return axes | _find_causes_within_tp(
        harness, config, [name for name in names if axes[name] == "tp"]
    )


def _find_faults_of_experts(
    harness: EngineHarness, config: Config, names: list[str]
) -> dict[str, str]:
    """Return ep for gradients that are correct if each data-parallel rank has all experts."""
    if not names or config.parallelism.ep == 1:
        return {}
    without_ep = replace(config, parallelism=replace(config.parallelism, ep=1))
    wrong = find_wrong_names(harness, without_ep)
    return {name: "ep" for name in names if name not in wrong}


def _find_causes_within_tp(
    harness: EngineHarness, config: Config, names: list[str]
) -> dict[str, str]:
    """Return sp or kv for gradients that are wrong along tp for one of these reasons."""
    layout, causes = config.parallelism, dict[str, str]()
    if names and layout.sequence_parallel:
        without_sp = replace(config, parallelism=replace(layout, sequence_parallel=False))
        wrong = find_wrong_names(harness, without_sp)
        causes = {name: "sp" for name in names if name not in wrong}
    if count_kv_replicas(config.model, layout.tp) > 1:
        of_kv_heads = [name for name in names if is_of_kv_heads(harness.parameters[name])]
        causes = dict.fromkeys(of_kv_heads, "kv") | causes
    return causes


def find_wrong_names(harness: EngineHarness, config: Config) -> set[str]:
    """Return on all ranks the names of gradients that are wrong with another configuration."""
    tokens = sample_batch(config)
    with harness.with_config(config) as built, built.with_gradient_source() as other:
        weights = other.load_random_weights()
        _, gradients = other.step_with_gradients(tokens)

        def compare() -> list[str]:
            exact, _ = compute_micro_batch_gradients(config, weights, tokens)
            return [error.name for error in _find_wrong_gradients(config, gradients, exact)]

        return set(other.broadcast_object(other.run_on_rank0(compare)))


def is_of_kv_heads(spec: ParameterSpec) -> bool:
    """Return True for a parameter of key/value heads, which ranks share if there are few heads."""
    is_kv = spec.name.split(".")[-2] in ("k_proj", "v_proj", "k_norm")
    return is_kv and not spec.sharding.is_replicated
