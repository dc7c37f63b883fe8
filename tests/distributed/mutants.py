"""Bugs that are planted in a rank one at a time, and the results of the doctor."""

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from hlat.checkpoint import checkpoint_store
from hlat.config.run import Config
from hlat.data.data_loader import DataLoader
from hlat.distributed.parallel_state import ParallelState
from hlat.distributed.parameter_shards import count_rows
from hlat.distributed.rank_environment import read_rank_info
from hlat.doctor import check_runner
from hlat.doctor.check_result import CheckResult
from hlat.doctor.check_runner import run_all_checks, run_checks
from hlat.doctor.engine_harness import EngineHarness
from hlat.engine import device_checks, state_shards
from hlat.engine.engine_factory import create_engine
from hlat.engine.native import (
    data_parallel,
    gradient_accumulation,
    model_parts,
    native_engine,
    pipeline_parallel,
)
from hlat.engine.native import tensor_parallel as regions
from hlat.engine.native.gradient_reduction import GradientReducer
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.model import attention, autograd_functions, decoder, linear, weight_initialization
from hlat.model.attention_kernels import KeyRange
from hlat.model.loss import IGNORE_INDEX
from hlat.model.parameter_spec import ParameterRole
from hlat.optim import lr_schedule, optimizer_factory
from hlat.optim.gradient_norm import compute_global_norm
from hlat.optim.update_rule import init_state
from hlat.precision import random_bits, stochastic_rounding
from tests.distributed import component_mutants, training_mutants
from tests.distributed.layout_overrides import DP, HSDP, KV, MICRO, PP, SP, TP
from tests.distributed.patching import Plant, around, patched


def diagnose(config: Config, mutant: str | None, names: list[str]) -> list[CheckResult]:
    """Return the results of checks on this rank with or without a bug."""
    with planted(mutant):
        harness = EngineHarness(config, create_engine(config))
        found = [*run_checks(harness, names)]
        harness.engine.close()
    return found


def planted(mutant: str | None) -> Any:
    """Return the context of a bug, or a null context."""
    return contextlib.nullcontext() if mutant is None else MUTANTS[mutant]()


def _raise_in_a_check(rank: int, right: Any) -> Any:
    def check(harness):
        yield from right(harness)
        if harness.engine.parallel_state.world_group.rank == rank:
            raise ZeroDivisionError("division by zero")

    return check


@contextlib.contextmanager
def check_raises(rank: int) -> Iterator[None]:
    """Make the check `labels` raise an exception on a rank."""
    checks = dict(check_runner.CHECKS) | {
        "labels": _raise_in_a_check(rank, check_runner.CHECKS["labels"])
    }
    with mock.patch.object(check_runner, "CHECKS", checks):
        yield


def exit_code(config: Config, folder: str, mutant: str) -> tuple[int, str]:
    """Return the exit code and the output of the doctor on this rank with a bug."""
    with MUTANTS[mutant](), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run_all_checks(config, Path(folder), create_engine(config))
    return code, printed.getvalue()


# Attention


def _core(visible: Callable[[int], Any], heads: slice = slice(None)) -> Plant:
    """Apply the mask `visible` instead of the causal mask to some heads."""
    right = attention.CoreAttention.forward

    def forward(self, q, k, v, *more):
        found = right(self, q, k, v, *more)
        if getattr(self, "well", False):
            return found
        seen = visible(q.shape[2])
        wrong = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        found = found.clone()
        found[:, heads] = wrong[:, heads]
        return found

    return patched(attention.CoreAttention, forward=forward)


def _everything(length: int) -> Any:
    return torch.ones(length, length, dtype=torch.bool)


def _one_too_many(length: int) -> Any:
    return _everything(length).tril(1)


@contextlib.contextmanager
def _second_layer_leaks() -> Iterator[None]:
    make = decoder.Decoder.__init__

    def init(self, *settings, **more):
        make(self, *settings, **more)
        for name, layer in self.layers.items():
            layer.self_attn.core.well = name != "1"

    with mock.patch.object(decoder.Decoder, "__init__", init), _core(_everything)():
        yield


def _sees_ahead(first):
    """Return the keys up to the end of the document."""
    positions = torch.arange(first.shape[1])
    ends = [[int(positions[row == start].max()) for start in row] for row in first]
    return KeyRange(first, torch.tensor(ends))


def _rotates_adjacent(x, cos_sin):
    """Rotate adjacent elements, as for the weight order of the original Llama."""
    cos, sin = cos_sin
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


# Labels and loss


def _shifted(by: int) -> Any:
    def targets(tokens, documents=None):
        following = tokens[:, by:].long()
        return F.pad(following, (0, by), value=IGNORE_INDEX)

    return targets


def _counts_the_first(right: Any) -> Any:
    return lambda sequences, loss_mask: np.ones_like(right(sequences, loss_mask))


# Backward passes


def _without_mean(ctx, grad):
    x, weight, scale = ctx.saved_tensors
    product = grad * (x * scale)
    return (grad * weight * scale).to(x.dtype), product.flatten(0, -2).sum(0), None


def _without_up(ctx, grad):
    (blocks,) = ctx.saved_tensors
    gate, _ = autograd_functions._split_gate_up(blocks, ctx.block_size)
    grad = torch.unflatten(grad, -1, (-1, ctx.block_size))
    grads = (torch.ops.aten.silu_backward(grad, gate.contiguous()), F.silu(gate) * grad)
    return torch.stack(grads, -2).flatten(-3), None, None, None


# Accumulation


def _drops_the_last(right: Any) -> Any:
    return lambda self, size: right(self, size)[: max(1, len(self.tokens) // size - 1)]


def _mean_of_means(right: Any) -> Any:
    def backward(self, batch, micro_batch_size, scale):
        num_micro_batches = max(1, len(batch.tokens) // micro_batch_size)
        return right(self, batch, micro_batch_size, scale / num_micro_batches)

    return backward


def _overwrites(right: Any) -> Any:
    def add(self, name, weight):
        self._counts.pop(name, None)
        right(self, name, weight)

    return add


def _result_has_nan(right: Any) -> Any:
    def forward(self, x):
        y = right(self, x).clone()
        y.view(-1)[0] = math.nan
        return y

    return forward


def _one_gradient_has_nan(right: Any) -> Any:
    def finalize(self, name):
        gradient = right(self, name)
        if name == "layers.1.mlp.down_proj.weight":
            gradient.view(-1)[3] = math.nan
        return gradient

    return finalize


# Initial values


def _same_in_all_layers(right: Any) -> Any:
    def stream(seed, name, block):
        parts = name.split(".")
        return right(seed, ".".join("0" if part.isdecimal() else part for part in parts), block)

    return stream


def _ignores_offset(right: Any) -> Any:
    def values(parameter, model, seed, offset, size):
        return right(parameter, model, seed, (0,) * len(offset), size)

    return values


# Optimizer


class _AdamW(torch.optim.AdamW):
    """Reimplementation of AdamW with one mistake."""

    mistake = ""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._one(weight, weight.grad, group)

    def _one(self, weight: Any, gradient: Any, group: Any) -> None:
        state, mistake = self.state[weight], self.mistake
        rate, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        decay = 0.0 if mistake == "no decay" else group["weight_decay"]
        if mistake == "decays gradients":
            gradient, decay = gradient + decay * weight, 0.0
        state["step"] += 2 if mistake == "counts twice" else 1
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first = 1 - beta1 ** state["step"]
        second = 1.0 if mistake == "no beta2 correction" else 1 - beta2 ** state["step"]
        root = (
            (square / second + eps).sqrt()
            if mistake == "epsilon inside"
            else ((square / second).sqrt() + eps)
        )
        weight.mul_(1 - rate * decay).addcdiv_(average / first, root, value=-rate)


def _adamw(mistake: str) -> Plant:
    def build(rule, param_groups, lr):
        optimizer = type("Made", (_AdamW,), {"mistake": mistake})(param_groups, lr)
        init_state(optimizer)
        return optimizer

    return patched(optimizer_factory, build_optimizer=build)


def _ignores_the_rate(right: Any) -> Any:
    return lambda self, rate, skip: right(self, 1e-3, skip)


def _one_step_ahead(right: Any) -> Any:
    return lambda step, begin, end: right(step + 1, begin, end)


# Rounding and precision


def _change_random_bits(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(right: Any) -> Any:
        return lambda self, rows, columns: change(right(self, rows, columns))

    return make


def _in_bf16(right: Any) -> Any:
    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16()).float()

    return forward


# Data parallelism


@contextlib.contextmanager
def _one_is_not_reduced(parameter: str = "layers.1.mlp.down_proj.weight") -> Iterator[None]:
    start = GradientReducer._start_reduction

    def skipped(self, name):
        if name != parameter:
            start(self, name)
            return
        gradient = self._finalize_gradient(name)
        self._pending[name] = lambda: gradient

    with mock.patch.object(GradientReducer, "_start_reduction", skipped):
        yield


def _local_norm(right: Any) -> Any:
    def over_ranks(self, loss, tensors):
        return right(self, loss, tensors)[0], compute_global_norm(tensors)

    return over_ranks


def _of_this_rank(right: Any) -> Any:
    return lambda seed, *rest: right(seed + read_rank_info().rank, *rest)


# Tensor parallelism


@contextlib.contextmanager
def _kv(times: int) -> Iterator[None]:
    complete = GradientReducer._finalize_gradient

    def summed(self, name):
        kv, axis = self._mesh.kv, self._mesh.kv.all_reduce

        def several(tensor):
            for _ in range(times):
                axis(tensor)

        with mock.patch.object(kv, "all_reduce", several):
            return complete(self, name)

    with mock.patch.object(GradientReducer, "_finalize_gradient", summed):
        yield


def _counts_copies(right: Any) -> Any:
    def shard(*settings):
        found = right(*settings)
        copies = [rows for rows in found.rows if rows.is_shared]
        return replace(found, num_owned_rows=count_rows(found.rows)) if copies else found

    return shard


# Pipelines


def _of_another_micro_batch(right: Any) -> Any:
    def backward(self, batch, micro_batch_size, scale):
        rolled = batch.targets.roll(len(batch.targets) // 2, 0)
        return right(self, replace(batch, targets=rolled), micro_batch_size, scale)

    return backward


def _averages_again(right: Any) -> Any:
    def made(*settings):
        make = right(*settings)
        return lambda stages, **more: make(stages, **more | {"scale_grads": True})

    return made


def _loses_the_last(right: Any) -> Any:
    def loss(self, output, targets):
        self.num_seen = getattr(self, "num_seen", 0) + 1
        return right(self, output, targets) * (0 if self.num_seen % 4 == 0 else 1)

    return loss


# Checkpoints and data


def _spoils_moments(right: Any) -> Any:
    def restore(path, shards):
        shard_list = [*shards]
        right(path, shard_list)
        for shard in shard_list:
            if shard.name.startswith("exp_avg_sq/"):
                shard.tensor.mul_(1.01)

    return restore


def _narrows(right: Any) -> Any:
    def restore(path, shards):
        shard_list = [*shards]
        right(path, shard_list)
        for shard in shard_list:
            shard.tensor.copy_(shard.tensor.detach().bfloat16())

    return restore


def _skips_one(right: Any) -> Any:
    def restore(self, state):
        lines = right(self, state)
        self.next_batch()
        return lines

    return restore


def _reverses_on_one(right: Any) -> Any:
    def following(self, step=None):
        sequences = right(self, step)
        return (
            replace(sequences, tokens=sequences.tokens[::-1].copy())
            if read_rank_info().rank
            else sequences
        )

    return following


def _without_the_last_norm(right: Any) -> Any:
    return lambda self: (one for one in right(self) if "model.norm" not in one.name)


def _adds_one(right: Any) -> Any:
    def product(one, other):
        result = right(one, other)
        result[7, 5] += 1
        return result

    return product


def _first_shard(self: ParallelState) -> Any:
    return 0, self.dp_size, self.model_parallel_group


# Compiler


def _without_input_gradient(forward: Callable[..., Any], x: torch.Tensor, *inputs: Any) -> Any:
    return forward(x.detach() + 0 * x, *inputs)


def _compile_wrongly(model_parts: Iterable[decoder.Decoder], backend: str) -> None:
    for layer in (layer for part in model_parts for layer in part.layers.values()):
        layer.forward = partial(_without_input_gradient, layer.forward)


MUTANTS: dict[str, Plant] = {
    "no mask": _core(_everything),
    "mask off by one": _core(_one_too_many),
    "one head leaks": _core(_everything, slice(1, 2)),
    "one layer leaks": _second_layer_leaks,
    "documents are ignored": patched(
        decoder, compute_document_starts=lambda d: torch.zeros_like(d, dtype=torch.int64)
    ),
    "documents see ahead": patched(decoder, KeyRange=_sees_ahead),
    "labels shifted by two": patched(native_engine, build_next_token_targets=_shifted(2)),
    "labels not shifted": patched(native_engine, build_next_token_targets=_shifted(0)),
    "one target too many": around(native_engine, "compute_loss_mask", _counts_the_first),
    "rotary order": patched(attention, apply_rotary_emb=_rotates_adjacent),
    "norm without its mean": patched(
        autograd_functions._RMSNorm, backward=staticmethod(_without_mean)
    ),
    "gate without up": patched(
        autograd_functions._GatedLinearUnit, backward=staticmethod(_without_up)
    ),
    "last micro batch dropped": around(pipeline_parallel.DeviceBatch, "split", _drops_the_last),
    "mean of means": around(pipeline_parallel.SequentialRunner, "backward", _mean_of_means),
    "sums overwritten": around(
        gradient_accumulation.GradientAccumulator, "_accumulate", _overwrites
    ),
    "a result is NaN": around(linear.Linear, "forward", _result_has_nan),
    "a gradient has a NaN": around(GradientReducer, "_finalize_gradient", _one_gradient_has_nan),
    "initial values not scaled": patched(
        weight_initialization, compute_init_std=lambda parameter, model: model.init_std
    ),
    "scaled by sqrt(L)": around(
        weight_initialization,
        "compute_init_std",
        lambda right: (
            lambda parameter, model: (
                right(parameter, model) * math.sqrt(1 + (parameter.role is ParameterRole.residual))
            )
        ),
    ),
    "layers drawn alike": around(weight_initialization, "_build_generator", _same_in_all_layers),
    "every shard drawn as the first": around(
        state_shards, "compute_initial_values", _ignores_offset
    ),
    "no beta2 correction": _adamw("no beta2 correction"),
    "epsilon inside the root": _adamw("epsilon inside"),
    "no weight decay": _adamw("no decay"),
    "decay through gradients": _adamw("decays gradients"),
    "updates counted twice": _adamw("counts twice"),
    "rate ignored": around(TrainableParameters, "step", _ignores_the_rate),
    "schedule one step ahead": around(lr_schedule, "_compute_progress", _one_step_ahead),
    "rounds towards zero": around(
        stochastic_rounding.StochasticRounder,
        "expand_random_bits",
        _change_random_bits(torch.zeros_like),
    ),
    "rounds to nearest": around(
        stochastic_rounding.StochasticRounder,
        "expand_random_bits",
        _change_random_bits(lambda bits: torch.full_like(bits, 0x8000)),
    ),
    "rounds away too often": around(
        stochastic_rounding.StochasticRounder,
        "expand_random_bits",
        _change_random_bits(lambda bits: bits | 0x4000),
    ),
    "products in bf16": around(linear.Linear, "forward", _in_bf16),
    "one parameter not reduced": _one_is_not_reduced,
    "replicas not summed": patched(data_parallel, _start_sum=lambda gradient, axis: None),
    "sum instead of mean": around(
        NativeEngine,
        "_count_global_target_tokens",
        lambda right: lambda self, sequences: self._count_target_tokens(sequences),
    ),
    "all ranks read the same": patched(ParallelState, data_shard=property(_first_shard)),
    "updates not shared": patched(
        data_parallel.DataParallelSharding, all_gather_params=lambda self, memory: None
    ),
    "norm of one rank": around(NativeEngine, "_all_reduce_metrics", _local_norm),
    "ranks round apart": around(random_bits, "_build_row_keys", _of_this_rank),
    "norm gradients not shared": patched(
        GradientReducer, _sum_replicated_gradients=lambda self, gradients: None
    ),
    "outputs not summed": patched(
        regions.TensorParallelRegions, reduce_from_tensor_parallel_region=lambda self, y: y
    ),
    "input gradients not summed": patched(
        regions._RegionBoundary,
        backward=staticmethod(lambda ctx, gradient: (gradient, None, None, None)),
    ),
    "key/value copies not summed": lambda: _kv(0),
    "key/value copies summed twice": lambda: _kv(2),
    "key/value copies count twice": around(model_parts, "compute_shard", _counts_copies),
    "targets of another micro batch": around(
        pipeline_parallel.PipelineRunner, "backward", _of_another_micro_batch
    ),
    "pipeline averages again": around(pipeline_parallel, "_select_schedule", _averages_again),
    "pipeline loses the last": around(
        pipeline_parallel.PipelineRunner, "_compute_loss", _loses_the_last
    ),
    "moments not restored": around(checkpoint_store, "load_checkpoint", _spoils_moments),
    "restored in bf16": around(checkpoint_store, "load_checkpoint", _narrows),
    "a parameter left out": around(NativeEngine, "state_shards", _without_the_last_norm),
    "resume skips a batch": around(DataLoader, "load_state_dict", _skips_one),
    "peers read different rows": around(DataLoader, "next_batch", _reverses_on_one),
    "a check raises on rank 0": lambda: check_raises(0),
    "a check raises on rank 1": lambda: check_raises(1),
    "a device multiplies wrongly": around(device_checks, "_matmul", _adds_one),
    "layers compiled wrongly": patched(native_engine, apply_compile=_compile_wrongly),
    **training_mutants.MUTANTS,
    **component_mutants.MUTANTS,
}

FOUND = {
    "no mask": ("", "causality", "layer 0 head 0", "model"),
    "mask off by one": ("", "causality", "layer 1 head 2", "model"),
    "one head leaks": ("", "causality", "layer 0 head 1", "model"),
    "one layer leaks": ("", "causality", "layer 1 head 3", "model"),
    "documents are ignored": ("", "causality", "layer 0 head 0", "model"),
    "documents see ahead": ("", "causality", "layer 0 head 0", "model"),
    "labels shifted by two": ("", "labels", "labels", "model"),
    "labels not shifted": ("", "labels", "labels", "model"),
    "one target too many": ("", "loss", "loss", "model"),
    "a result is NaN": ("", "labels", "loss", "model"),
    "a gradient has a NaN": (DP, "gradients", "layers.1.mlp.down_proj", "dp"),
    "rotary order": ("", "gradients", "q_proj", "model"),
    "norm without its mean": ("", "gradients", "embed_tokens", "model"),
    "gate without up": ("", "gradients", "gate_proj", "model"),
    "last micro batch dropped": (MICRO, "gradients", "lm_head.weight", "accumulation"),
    "mean of means": (MICRO, "accumulation", "lm_head.weight", "accumulation"),
    "sums overwritten": (f"{MICRO} precision=mixed", "gradients", "down_proj", "accumulation"),
    "initial values not scaled": ("", "initialisation", "o_proj", "model"),
    "scaled by sqrt(L)": ("", "initialisation", "down_proj", "model"),
    "layers drawn alike": ("", "initialisation", "layers.1.", "model"),
    "every shard drawn as the first": (TP, "initialisation", "lm_head", "tp"),
    "no beta2 correction": ("", "optimizer", "weights", "update"),
    "epsilon inside the root": ("", "optimizer", "weights", "update"),
    "no weight decay": ("", "optimizer", "weight decay", "update"),
    "decay through gradients": ("", "optimizer", "weight decay", "update"),
    "updates counted twice": ("", "optimizer", "updates", "update"),
    "rate ignored": ("", "optimizer", "weights", "update"),
    "schedule one step ahead": ("", "schedule", "rate of step", "schedule"),
    "rounds towards zero": ("precision=bf16_sr", "rounding", "drift", "rounding"),
    "rounds to nearest": ("precision=bf16_sr", "rounding", "share", "rounding"),
    "rounds away too often": ("precision=bf16_sr", "rounding", "drift", "rounding"),
    "products in bf16": ("", "numerics", "grad_norm", "precision"),
    "one parameter not reduced": (DP, "reduction", "layers.1.mlp.down_proj", "dp"),
    "replicas not summed": (HSDP, "reduction", "layers.1.mlp.down_proj", "dp"),
    "sum instead of mean": (DP, "reduction", "embed_tokens", "dp"),
    "all ranks read the same": (DP, "data", "rows that are read twice", "dp"),
    "updates not shared": (f"{DP} parallelism.zero=1", "next step", "weights", "dp"),
    "norm of one rank": (f"{DP} parallelism.zero=1", "gradient norm", "grad_norm", "dp"),
    "ranks round apart": (f"{DP} precision=bf16_sr", "replicas", "down_proj", "dp"),
    "norm gradients not shared": (SP, "gradients", "layernorm", "sp"),
    "outputs not summed": (TP, "gradients", "embed_tokens", "tp"),
    "input gradients not summed": (TP, "gradients", "embed_tokens", "tp"),
    "key/value copies not summed": (KV, "gradients", "k_proj", "kv"),
    "key/value copies summed twice": (KV, "gradients", "v_proj", "kv"),
    "key/value copies count twice": (KV, "gradient norm", "grad_norm", "kv"),
    "targets of another micro batch": (PP, "gradients", "lm_head", "pp"),
    "pipeline averages again": (PP, "pipeline", "q_proj", "pp"),
    "pipeline loses the last": (PP, "pipeline", "lm_head", "pp"),
    "moments not restored": ("", "checkpoint", "exp_avg_sq/", "here"),
    "restored in bf16": ("", "checkpoint", "weights/", "here"),
    "a parameter left out": ("", "initialisation", "model.norm.weight", "model"),
    "resume skips a batch": ("", "data", "rows after a resume", "data"),
    "peers read different rows": (TP, "data", "rows of peers", "tp+pp"),
    "layers compiled wrongly": ("compiler=inductor", "gradients", "embed_tokens", "compiler"),
    **training_mutants.FOUND,
    **component_mutants.FOUND,
}
"""Overrides, failing check, part of the name of the finding, and axis of each mutant."""
