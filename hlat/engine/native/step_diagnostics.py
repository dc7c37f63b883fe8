"""Quantities that show an instability of a training step, for tracking.diagnostics.

Instabilities of large models appear in small ones at high learning rates: logits of attention and
of the output grow (arXiv 2309.14322). With a large beta2, the second moment follows the gradients
too slowly, so that updates after a jump are too large (arXiv 2304.13013). In bf16, a small update
may leave a weight unchanged.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hlat.config.run import Config
from hlat.distributed.object_group import ObjectGroup
from hlat.engine.native.tensor_parallel import TensorParallelRegions
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.model.attention import CoreAttention
from hlat.model.attention_logits import compute_max_attention_logit
from hlat.model.decoder import Decoder
from hlat.model.loss import compute_logit_statistics
from hlat.model.mlp_spec import StepMetricValue
from hlat.optim.optimizer_spec import get_optimizer_spec

_LAYER, _RATIOS, _NUM_RATIOS = "layer ", "ratios ", "number of ratios "
"""Prefixes of the names of values of a layer and of a parameter."""
_SUMS, _MAXIMA = "sums", "maxima"

RankValues = dict[str, dict[str, float]]
"""Sums and maxima of a rank by name."""


class StepDiagnostics:
    """Diagnostics of one training step on this rank; `gather` combines those of all ranks.

    Args:
        config: Configuration of the run.
        is_observed: True on the ranks that compute the first sequence of the global batch, the only
            one with observed logits.
    """

    def __init__(self, config: Config, is_observed: bool) -> None:
        self._config, self._is_observed = config, is_observed
        self._values: dict[str, dict[str, Tensor]] = {_SUMS: {}, _MAXIMA: {}}
        self._weights: dict[str, Tensor] = {}
        self._lr = 0.0

    @contextmanager
    def observe_logits(
        self, parts: Iterable[Decoder], regions: TensorParallelRegions
    ) -> Iterator[None]:
        """Observe a forward pass of the model parts; compiled layers run eagerly."""
        with ExitStack() as stack:
            for part in parts:
                for layer, module in _iter_attention_cores(part):
                    before = self._build_attention_hook(layer)
                    stack.callback(module.register_forward_pre_hook(before).remove)
                if part.norm is not None:
                    after = self._build_output_hook(regions)
                    stack.callback(part.register_forward_hook(after).remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def start_update(self, params: TrainableParameters, learning_rate: float) -> None:
        """Copy the weights that the optimizer is about to update."""
        weights = params.select_owned_rows(params.optimizer_params)
        self._weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self._lr = learning_rate

    @torch.no_grad()
    def finish_update(self, params: TrainableParameters, gradients: Mapping[str, Tensor]) -> None:
        """Compare the weights with their copies, and the gradients with the second moments."""
        weights = params.select_owned_rows(params.optimizer_params)
        for name, gradient in params.select_owned_rows(gradients).items():
            before, has_gradient = self._weights.pop(name), gradient != 0
            change = weights[name].float() - before.float()
            self._add("squared changes", change.square().sum())
            self._add("weights", torch.ones_like(has_gradient).sum())
            self._add("gradients", has_gradient.sum())
            self._add("unchanged", (has_gradient & (weights[name] == before)).sum())
            moment = self._compute_second_moment(params, name)
            if moment is not None:
                self._compare_with_moment(name, gradient.float(), moment[: len(gradient)])

    def gather(self, group: ObjectGroup) -> dict[str, StepMetricValue]:
        """Wait for the device, and return the columns of metrics.jsonl on rank 0, else {}."""
        local = {kind: _copy_to_host(values) for kind, values in self._values.items()}
        merged: RankValues | None = group.reduce_object(local, _merge_ranks)
        return {} if merged is None else self._build_columns(merged)

    def _build_columns(self, merged: RankValues) -> dict[str, StepMetricValue]:
        sums, maxima = merged[_SUMS], merged[_MAXIMA]
        layers = [maxima.get(f"{_LAYER}{n}") for n in range(self._config.model.num_layers)]
        known = [value for value in layers if value is not None]
        columns: dict[str, StepMetricValue] = {}
        if known:
            columns |= {"attention_logit_max": max(known), "attention_logits": layers}
        columns |= {"output_logit_max": maxima["output"], "output_log_z": maxima["log z"]}
        if self._lr:
            mean_square = sums["squared changes"] / sums["weights"]
            columns["update_rms"] = math.sqrt(mean_square) / self._lr
        columns["unchanged_weights"] = sums["unchanged"] / max(1.0, sums["gradients"])
        ratios = [
            value / sums[_NUM_RATIOS + name.removeprefix(_RATIOS)]
            for name, value in sums.items()
            if name.startswith(_RATIOS)
        ]
        if ratios:
            columns["moment_ratio_rms"] = math.sqrt(max(ratios))
            columns["moment_underflow"] = sums["underflow"] / max(1.0, sums["compared"])
        return columns

    def _compute_second_moment(self, params: TrainableParameters, name: str) -> Tensor | None:
        """Return the averaged squared gradients without bias, fp32; None if there are none."""
        settings, role = self._config.optimizer, params.shards[name].role
        spec = get_optimizer_spec(settings.name)
        for tensor in spec.list_state_tensors(role):
            if tensor.is_squared and tensor.decay is not None and spec.is_elementwise(role):
                state, decay = params.get_state(name), attrgetter(tensor.decay)(settings)
                num_updates = state["step"].float().clamp(min=1)
                moment: Tensor = state[tensor.name].float() / (1 - decay**num_updates)
                return moment
        return None

    def _compare_with_moment(self, name: str, gradient: Tensor, moment: Tensor) -> None:
        """Add the ratios of squared gradients to second moments, and count too small moments."""
        squared_eps, has_gradient = self._config.optimizer.eps**2, gradient != 0
        self._add(_RATIOS + name, (gradient.square() / moment.clamp(min=squared_eps)).sum())
        self._add(_NUM_RATIOS + name, torch.ones_like(has_gradient).sum())
        self._add("compared", has_gradient.sum())
        self._add("underflow", (has_gradient & (moment < squared_eps)).sum())

    def _build_attention_hook(self, layer: str) -> Callable[..., None]:
        def record(module: CoreAttention, inputs: tuple[Any, ...]) -> None:
            queries, keys, _, key_range, *_ = inputs
            largest = compute_max_attention_logit(
                queries, keys, module.scale, key_range, module.window
            )
            self._set_maximum(_LAYER + layer, largest)

        return record

    def _build_output_hook(self, regions: TensorParallelRegions) -> Callable[..., None]:
        def record(part: Decoder, inputs: tuple[Any, ...], output: Tensor) -> None:
            hidden = regions.copy_to_tensor_parallel_region(output)
            largest, log_z = compute_logit_statistics(
                hidden, part.lm_head_weight, regions.vocab_shard, part.config.head.logit_softcap
            )
            self._set_maximum("output", largest)
            self._set_maximum("log z", log_z)  # the same on all ranks that have it

        return record

    def _set_maximum(self, name: str, value: Tensor) -> None:
        if self._is_observed:
            self._values[_MAXIMA][name] = value

    def _add(self, name: str, value: Tensor) -> None:
        """Add a scalar to a sum over parameters."""
        sums, value = self._values[_SUMS], value.to(torch.float32)
        sums[name] = sums[name] + value if name in sums else value


def _iter_attention_cores(part: Decoder) -> Iterator[tuple[str, CoreAttention]]:
    """Yield the softmax attention of each layer with the number of the layer."""
    for layer, block in part.layers.items():
        for module in block.modules():
            if isinstance(module, CoreAttention):
                yield layer, module


def _copy_to_host(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalars as numbers, with one transfer from the device."""
    if not values:
        return {}
    return dict(zip(values, torch.stack([*values.values()]).tolist(), strict=True))


def _merge_ranks(ranks: list[RankValues]) -> RankValues:
    """Return the sums and maxima over ranks."""
    merged: RankValues = {_SUMS: {}, _MAXIMA: {}}
    for one in ranks:
        for name, value in one[_SUMS].items():
            merged[_SUMS][name] = merged[_SUMS].get(name, 0.0) + value
        for name, value in one[_MAXIMA].items():
            merged[_MAXIMA][name] = max(merged[_MAXIMA].get(name, -math.inf), value)
    return merged
