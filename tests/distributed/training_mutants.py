"""Bugs of schedule, optimizer, rounding, precision, evaluation and data, which the doctor finds."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from hlat.data import packed_sequences
from hlat.data.data_mixture import MixtureStage
from hlat.data.data_source import DataSource
from hlat.data.token_streams import TokenStream
from hlat.data.tokenizer import Tokenizer
from hlat.engine.native import native_engine
from hlat.engine.native.gradient_accumulation import GradientAccumulator
from hlat.engine.native.gradient_reduction import GradientReducer
from hlat.engine.native.matrix_exchange import MatrixExchange
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.native.step_rounding import NearestRounding, StochasticRounding
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.model import attention, decoder
from hlat.model.decoder import Decoder
from hlat.model.loss import IGNORE_INDEX
from hlat.model.norm import RMSNorm
from hlat.optim import lr_schedule, muon, normuon, optimizer_factory, soap
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.muon_spec import MuonSpec
from hlat.optim.normuon_spec import NorMuonSpec
from hlat.optim.soap_spec import SoapSpec
from hlat.optim.update_rule import UpdateRule
from hlat.precision import random_bits
from hlat.precision.random_bits import RandomBitsGenerator
from hlat.precision.stochastic_rounding import StochasticRounder
from tests.distributed.layout_overrides import DP, MICRO, TP
from tests.distributed.patching import Plant, around, patched

# Schedule


def _one_step_late(right: Any) -> Any:
    return lambda step, config: right(max(0, step - 1), config)


def _without_end(right: Any) -> Any:
    return lambda *settings: replace(right(*settings), end_lr=None)


def _to_the_end_of_the_run(right: Any) -> Any:
    return lambda *settings: (right(*settings)[0], None)


# Optimizer


def _adamw_settings(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    def make(right: Any) -> Any:
        return lambda *settings: (hyperparameters := right(*settings)) | change(hyperparameters)

    return around(AdamWSpec, "build_hyperparameters", make)


def _decay(all_norms: bool) -> Plant:
    def make(right: Any) -> Any:
        return lambda optimizer, *others: right(replace(optimizer, decay_norms=all_norms), *others)

    return around(optimizer_factory, "build_param_groups", make)


def _by_largest_element(parameters: Any, max_norm: float, total_norm: Tensor) -> None:
    params = [param for param in parameters if param.grad is not None]
    norm = torch.stack([param.grad.abs().max() for param in params]).max()
    for param in params:
        param.grad.mul_(torch.clamp(max_norm / norm, max=1.0))


def _one_by_one(parameters: Any, max_norm: float, total_norm: Tensor) -> None:
    for param in parameters:
        if param.grad is not None:
            param.grad.mul_(torch.clamp(max_norm / (param.grad.norm() + 1e-6), max=1.0))


@contextlib.contextmanager
def _clip(function: Any) -> Iterator[None]:
    with mock.patch.object(native_engine.torch.nn.utils, "clip_grads_with_norm_", function):
        yield


def _never(right: Any) -> Any:
    return lambda self, rate, skip: right(self, rate, torch.zeros_like(skip))


@contextlib.contextmanager
def _rate_of_the_last_step() -> Iterator[None]:
    right = TrainableParameters.step

    def step(self, rate, skip):
        rate, self.late = getattr(self, "late", rate), rate
        right(self, rate, skip)

    with mock.patch.object(TrainableParameters, "step", step):
        yield


@contextlib.contextmanager
def _decay_with_the_peak_rate() -> Iterator[None]:
    right = TrainableParameters.step

    def step(self, rate, skip):
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1 * 1e-3 / rate if rate else 0.1
        right(self, rate, skip)

    with mock.patch.object(TrainableParameters, "step", step):
        yield


def _of_whole_matrices(spec: type, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    def make(right: Any) -> Any:
        def build(self, settings, role):
            found = right(self, settings, role)
            return found if self.is_elementwise(role) else found | change(found)

        return build

    return around(spec, "build_hyperparameters", make)


def _update_rule(rule: UpdateRule, make: Callable[[Any], Any]) -> Plant:
    def build(right: Any) -> Any:
        changed = replace(rule, compute_matrix=make(rule.compute_matrix))
        return lambda settings: changed

    return around(optimizer_factory, "get_update_rule", build)


def _one_value_per_matrix(right: Any) -> Any:
    def compute(values, step, group):
        update, average, second = right(values, step, group)
        return [update, average, second.mean().expand_as(second)]

    return compute


def _in_the_former_order(right: Any) -> Any:
    return lambda gram, basis: (right(gram, basis)[0], torch.arange(len(gram)))


def _in_the_other_direction(right: Any) -> Any:
    return lambda matrix, state, back=False: right(matrix, state, not back)


def _of_the_transposed_matrix(right: Any) -> Any:
    return lambda self, settings, shape: right(self, settings, shape[::-1])


def _of_each_slice(self, slices, compute, result_dtype):
    for index, matrix in enumerate(slices):
        yield index, muon.orthogonalize(matrix.reshape(len(matrix), -1), 5, result_dtype)


# Rounding


def _counts(change: Callable[[Tensor], Tensor]) -> Plant:
    def make(right: Any) -> Any:
        return lambda self, counters: right(self, change(counters))

    return around(RandomBitsGenerator, "generate", make)


def _moments_to_nearest(right: Any) -> Any:
    def expand(self, row_keys, column_keys):
        bits = right(self, row_keys, column_keys)
        bits[1:] = 0x8000
        return bits

    return expand


def _of_the_first_micro_batch(right: Any) -> Any:
    return lambda self, name, micro_batch, *more: right(self, name, 1, *more)


def _in_the_first_step(right: Any) -> Any:
    def copy(self, *settings):
        with mock.patch.object(self, "_get_step_count", return_value=torch.zeros(())):
            right(self, *settings)

    return copy


def _truncate(self, name, target, source):
    if source.dtype == target.dtype:
        target.copy_(source)
    else:
        target.copy_((source.view(torch.int32) & -65536).view(torch.float32))


def _of_the_first_row(right: Any) -> Any:
    def keys(*settings):
        found = right(*settings)
        return found[:1].expand_as(found).contiguous()

    return keys


def _of_one_column(right: Any) -> Any:
    def keys(*settings):
        found = right(*settings)
        return found[:, :1].expand_as(found).contiguous()

    return keys


def _of_one_name(right: Any) -> Any:
    return lambda seed, name, *more: right(seed, "weight", *more)


# Precision


def _in_bf16(right: Any) -> Any:
    def init(self, params, dtype, rounding):
        right(self, params, torch.bfloat16, rounding)

    return init


def _reduces_in_bf16(right: Any) -> Any:
    def init(self, accumulator, params, mesh, dtype):
        right(self, accumulator, params, mesh, torch.bfloat16)

    return init


def _norm_in_bf16(self, x):
    x = x.bfloat16()
    mean = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + self.eps) * self.get_scale().to(x.dtype)


def _angles_in_bf16(right: Any) -> Any:
    return lambda *settings: right(*settings, angle_dtype=torch.bfloat16)


def _softmax_in_bf16(q, k, v, scale, key_range, window, softcap, sinks):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, -torch.inf).softmax(-1) @ v


def _loss_in_bf16(right: Any) -> Any:
    def loss(x, head, targets, scale, fp32, *more):
        return right(x, head, targets, scale, False, *more)

    return loss


# Loss


def _mean_of_micro_batch(right: Any) -> Any:
    def loss(x, head, targets, scale, *more):
        count = int((targets != IGNORE_INDEX).sum())
        return right(x, head, targets, 1 / (2 * count) if torch.is_grad_enabled() else scale, *more)

    return loss


# Evaluation


def _one_target_more(right: Any) -> Any:
    def evaluate(self, sequences):
        if sequences.target_mask is not None:
            mask = sequences.target_mask.copy()
            mask[:, 1:] |= sequences.target_mask[:, :-1]
            sequences = replace(sequences, target_mask=mask)
        return right(self, sequences)

    return evaluate


def _mean_of_rows(right: Any) -> Any:
    def read(self, metrics):
        found = right(self, metrics)
        if found.token_losses is None:
            return found
        num_targets = np.maximum(1, np.count_nonzero(found.token_losses, axis=1))
        return replace(found, loss=float((found.token_losses.sum(1) / num_targets).mean()))

    return read


# Data


def _skips_documents(self, source, count, run):
    cursor = self.cursors[source]
    del self._runs[source]
    cursor.chunk_start, cursor.token_offset = run.next_chunk_start, 0
    cursor.document += 2 * count * (run.next_chunk_start == 0)


def _without_bos(right: Any) -> Any:
    return lambda self, documents, is_first=True, is_last=True: right(
        self, documents, False, is_last
    )


def _without_eos(right: Any) -> Any:
    return lambda self, documents, is_first=True, is_last=True: right(
        self, documents, is_first, False
    )


def _first_name(self, tokens, segment_tokens):
    return self.proportions[0][0]


def _order_repeats(right: Any) -> Any:
    return lambda self, position: right(self, position - position % 2)


def _local_count(self, sequences):
    return self._count_target_tokens(sequences) * self._mesh.dp.size


def _boundaries_are_targets(right: Any) -> Any:
    return lambda tokens, documents=None: right(tokens)


def _reads_heldout(right: Any) -> Any:
    def row(self, position):
        epoch, index = divmod(position, self.num_training_documents)
        return self._split_permutation(self._epoch_permutation(epoch)(index))

    return row


def _of_the_first_epoch(right: Any) -> Any:
    return lambda self, epoch: right(self, 0)


def _of_seed_zero(right: Any) -> Any:
    def permutation(self, epoch):
        self._seed = 0
        return right(self, epoch)

    return permutation


def _one_token_late(right: Any) -> Any:
    def ids(tokens, *settings):
        found = right(tokens, *settings)
        return np.concatenate((found[:, :1], found[:, :-1]), 1)

    return ids


# Model


def _base_times_two(right: Any) -> Any:
    return lambda model, *more: right(replace(model, rope_theta=2 * model.rope_theta), *more)


@contextlib.contextmanager
def _detached_head() -> Iterator[None]:
    weight = property(lambda self: self.embed_tokens.weight.detach())
    with mock.patch.object(Decoder, "lm_head_weight", weight):
        yield


@contextlib.contextmanager
def _one_position_later() -> Iterator[None]:
    right = Decoder._compute_rope

    def compute(self, positions, dtype):
        is_appended = positions.dim() == 2 and bool(positions.min())
        return right(self, positions + int(is_appended), dtype)

    with mock.patch.object(Decoder, "_compute_rope", compute):
        yield


_PHASE = "phase.timeline=[{name:a,tokens:12800,lr:1e-3,end_lr:1e-4},{name:b,tokens:51200,lr:2e-3},{name:c}]"
_SR, _MIXED = "precision=bf16_sr", "precision=mixed"

MUTANTS: dict[str, Plant] = {
    "rate one step late": around(lr_schedule, "compute_lr", _one_step_late),
    "rate of the last step": _rate_of_the_last_step,
    "end rate ignored": around(lr_schedule, "find_stage", _without_end),
    "end rate at the end of the run": around(
        lr_schedule, "find_stage_span", _to_the_end_of_the_run
    ),
    "betas swapped": _adamw_settings(lambda kwargs: {"betas": kwargs["betas"][::-1]}),
    "beta2 is beta1": _adamw_settings(
        lambda kwargs: {"betas": (kwargs["betas"][0], kwargs["betas"][0])}
    ),
    "epsilon too large": _adamw_settings(lambda kwargs: {"eps": 100 * kwargs["eps"]}),
    "epsilon too small": _adamw_settings(lambda kwargs: {"eps": kwargs["eps"] / 100}),
    "no Nesterov momentum": _of_whole_matrices(MuonSpec, lambda found: {"nesterov": False}),
    "one iteration less": _of_whole_matrices(
        MuonSpec, lambda found: {"num_iterations": found["num_iterations"] - 1}
    ),
    "scale of the transposed matrix": around(
        MuonSpec, "get_matrix_scale", _of_the_transposed_matrix
    ),
    "rate of the embedding ignored": patched(MuonSpec, get_lr_factor=lambda *settings: 1.0),
    "shards are orthogonalized": patched(MatrixExchange, update=_of_each_slice),
    "one second moment per matrix": _update_rule(normuon.NORMUON, _one_value_per_matrix),
    "decay of the rows ignored": _of_whole_matrices(
        NorMuonSpec, lambda found: {"beta2": found["momentum"] / 2}
    ),
    "second moment in the former order": around(soap, "improve_eigenbasis", _in_the_former_order),
    "rotation in the other direction": around(soap, "_rotate", _in_the_other_direction),
    "eigenbases too rarely": _of_whole_matrices(
        SoapSpec, lambda found: {"precondition_frequency": 2001}
    ),
    "norms decayed": _decay(True),
    "norms not decayed": _decay(False),
    "no clipping": lambda: _clip(lambda *settings: None),
    "clipped by the largest element": lambda: _clip(_by_largest_element),
    "parameters clipped one by one": lambda: _clip(_one_by_one),
    "NaN not skipped": around(TrainableParameters, "step", _never),
    "noise repeats every step": _counts(lambda counters: counters % (1 << 20)),
    "noise shared between rows": around(random_bits, "_build_row_keys", _of_the_first_row),
    "noise shared between columns": around(random_bits, "_build_column_keys", _of_one_column),
    "noise shared between parameters": around(random_bits, "_build_row_keys", _of_one_name),
    "noise shared with the moments": _counts(lambda counters: counters - counters % (1 << 20)),
    "accumulation rounded to nearest": patched(StochasticRounding, add_=NearestRounding.add_),
    "master copy rounded to nearest": patched(StochasticRounding, copy_=NearestRounding.copy_),
    "master copy repeats its noise": around(StochasticRounding, "copy_", _in_the_first_step),
    "master copy truncated": patched(NearestRounding, copy_=_truncate),
    "accumulation in bf16": around(GradientAccumulator, "__init__", _in_bf16),
    "reduction in bf16": around(GradientReducer, "__init__", _reduces_in_bf16),
    "moments rounded to nearest": around(
        StochasticRounder, "expand_random_bits", _moments_to_nearest
    ),
    "micro batches round alike": around(StochasticRounding, "add_", _of_the_first_micro_batch),
    "means of micro batches": around(native_engine, "linear_cross_entropy", _mean_of_micro_batch),
    "held-out documents are read": around(DataSource, "get_training_row", _reads_heldout),
    "epochs have one order": around(DataSource, "_build_epoch_permutation", _of_the_first_epoch),
    "order without the seed": around(DataSource, "_build_epoch_permutation", _of_seed_zero),
    "decay with the peak rate": _decay_with_the_peak_rate,
    "norm in bf16": patched(RMSNorm, forward=_norm_in_bf16),
    "angles in bf16": around(decoder, "compute_rope_cos_sin", _angles_in_bf16),
    "softmax in bf16": patched(attention, attend=_softmax_in_bf16),
    "loss in bf16": around(native_engine, "linear_cross_entropy", _loss_in_bf16),
    "evaluation of one token more": around(NativeEngine, "eval_step", _one_target_more),
    "evaluation averages rows": around(NativeEngine, "read_metrics", _mean_of_rows),
    "documents skipped": patched(TokenStream, _finish_documents=_skips_documents),
    "BOS missing": around(Tokenizer, "join_documents", _without_bos),
    "EOS missing": around(Tokenizer, "join_documents", _without_eos),
    "one source only": patched(MixtureStage, select_next_source=_first_name),
    "documents repeated": around(DataSource, "get_training_row", _order_repeats),
    "boundaries of documents shifted": around(
        packed_sequences, "compute_document_ids", _one_token_late
    ),
    "local denominator": patched(NativeEngine, _count_global_target_tokens=_local_count),
    "first tokens of documents are targets": around(
        native_engine, "build_next_token_targets", _boundaries_are_targets
    ),
    "base of the rotation": around(decoder, "compute_rope_cos_sin", _base_times_two),
    "tied head without gradient": _detached_head,
    "positions of the cache": _one_position_later,
}

_MUON, _SOAP = "optimizer.name=muon", "optimizer.name=soap"
FOUND = {
    "rate one step late": ("", "schedule", "rate of step 1", "schedule"),
    "rate of the last step": ("", "optimizer", "weights", "update"),
    "end rate ignored": (_PHASE, "schedule", "rate of step 1", "schedule"),
    "end rate at the end of the run": (_PHASE, "schedule", "rate of step 1", "schedule"),
    "betas swapped": ("", "clipping", "optimizer.beta1", "update"),
    "beta2 is beta1": ("", "optimizer", "optimizer.beta2", "update"),
    "epsilon too large": ("", "optimizer", "weights", "update"),
    "epsilon too small": ("", "optimizer", "weights", "update"),
    "no Nesterov momentum": (_MUON, "optimizer", "proj.weight weights", "update"),
    "one iteration less": (_MUON, "optimizer", "proj.weight weights", "update"),
    "scale of the transposed matrix": (
        f"{_MUON} optimizer.muon.scale=original",
        *("optimizer", "proj.weight weights", "update"),
    ),
    "rate of the embedding ignored": (
        f"{_MUON} optimizer.muon.adamw_lr=1e-4",
        *("optimizer", "embed_tokens.weight weights", "update"),
    ),
    "shards are orthogonalized": (
        f"{_MUON} {TP}",
        *("optimizer", "proj.weight weights", "update"),
    ),
    "one second moment per matrix": (
        "optimizer.name=normuon",
        *("optimizer", "second_momentum_buffer", "update"),
    ),
    "decay of the rows ignored": (
        "optimizer.name=normuon",
        *("optimizer", "second_momentum_buffer", "update"),
    ),
    "second moment in the former order": (_SOAP, "optimizer", "rotated_exp_avg_sq", "update"),
    "rotation in the other direction": (_SOAP, "optimizer", "proj.weight", "update"),
    "eigenbases too rarely": (_SOAP, "optimizer", "basis", "update"),
    "norms decayed": ("optimizer.decay_norms=false", "optimizer", "norm.weight", "update"),
    "norms not decayed": ("optimizer.decay_norms=true", "optimizer", "norm.weight", "update"),
    "decay with the peak rate": ("", "optimizer", "weight decay", "update"),
    "no clipping": ("", "clipping", "optimizer.grad_clip", "update"),
    "clipped by the largest element": ("", "clipping", "optimizer.grad_clip", "update"),
    "parameters clipped one by one": (
        "optimizer.grad_clip=0.1",
        "clipping",
        "optimizer.grad_clip",
        "update",
    ),
    "NaN not skipped": ("", "skipping", "exp_avg/model.norm.weight", "update"),
    "noise repeats every step": (_SR, "rounding", "random bits of steps", "rounding"),
    "noise shared between rows": (_SR, "rounding", "random bits of rows", "rounding"),
    "noise shared between columns": (_SR, "rounding", "random bits of columns", "rounding"),
    "noise shared between parameters": (_SR, "rounding", "random bits of parameters", "rounding"),
    "noise shared with the moments": (
        _SR,
        "rounding",
        "random bits of weights and moments",
        "rounding",
    ),
    "moments rounded to nearest": (_SR, "rounding", "drift of the exp_avg_sq", "rounding"),
    "accumulation rounded to nearest": (
        _SR,
        "accumulation",
        "rounding of the sums",
        "accumulation",
    ),
    "micro batches round alike": (_SR, "accumulation", "random bits", "accumulation"),
    "master copy rounded to nearest": (
        "precision=bf16_sr_master",
        "master copy",
        "stochastic rounding",
        "rounding",
    ),
    "master copy repeats its noise": (
        "precision=bf16_sr_master",
        "master copy",
        "stochastic rounding",
        "rounding",
    ),
    "master copy truncated": (_MIXED, "master copy", "rounding to nearest", "rounding"),
    "accumulation in bf16": (
        f"{_MIXED} {MICRO}",
        "accumulation",
        "rounding of the sums",
        "accumulation",
    ),
    "reduction in bf16": (f"{_MIXED} {DP}", "accumulation", "dtype of the sums", "accumulation"),
    "norm in bf16": (_MIXED, "fp32 operators", "norm or loss", "precision"),
    "softmax in bf16": (_MIXED, "fp32 operators", "softmax", "precision"),
    "loss in bf16": (_MIXED, "fp32 operators", "norm or loss", "precision"),
    "angles in bf16": (_MIXED, "fp32 operators", "rotary angles", "precision"),
    "means of micro batches": (f"{MICRO} data.loss_mask=true", "loss", "loss", "model"),
    "evaluation of one token more": ("", "labels", "targets in the mean", "model"),
    "evaluation averages rows": ("data.loss_mask=true", "labels", "targets", "model"),
    "documents skipped": ("", "data", "order of documents", "data"),
    "BOS missing": ('data.bos_token="<|endoftext|>"', "data", "data.bos_token", "data"),
    "EOS missing": ("", "data", "data.eos_token", "data"),
    "one source only": ("", "data", "order of documents", "data"),
    "documents repeated": ("", "data", "documents of an epoch", "data"),
    "held-out documents are read": ("", "data", "documents of an epoch", "data"),
    "epochs have one order": ("", "data", "order of the second epoch", "data"),
    "order without the seed": ("", "data", "order of another run.seed", "data"),
    "boundaries of documents shifted": ("data.loss_mask=true", "data", "documents of the", "data"),
    "local denominator": (f"{DP} data.loss_mask=true", "reduction", "lm_head.weight", "dp"),
    "first tokens of documents are targets": (
        "data.loss_mask=true",
        "gradients",
        "lm_head",
        "model",
    ),
    "base of the rotation": ("", "gradients", "q_proj", "model"),
    "tied head without gradient": (
        "model.tie_embeddings=true",
        "gradients",
        "embed_tokens",
        "model",
    ),
    "positions of the cache": ("", "decoding", "KV cache", "model"),
}
"""Overrides, failing check, part of the name of the finding, and axis of each mutant."""

DEFAULT = {
    *("rate one step late", "end rate ignored", "betas swapped", "NaN not skipped"),
    *("noise shared between rows", "accumulation rounded to nearest"),
    *("master copy rounded to nearest", "norm in bf16", "evaluation of one token more"),
    *("EOS missing", "local denominator", "positions of the cache"),
}
"""Bugs of the default suite: one for each check and cause."""
