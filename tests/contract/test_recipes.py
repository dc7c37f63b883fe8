"""Dtypes, memory, checkpoints and convergence of every precision recipe."""

import dataclasses

import numpy as np
import pytest
import torch

from hlat.checkpoint import checkpoint_store
from hlat.config.precision import Dtype, RoundingMode
from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.engine_factory import create_engine
from hlat.model.decoder_spec import count_parameters
from hlat.optim.adamw_spec import AdamWSpec
from hlat.precision import stochastic_rounding
from hlat.precision.precision_bytes import compute_bytes_per_parameter
from hlat.precision.torch_dtypes import TORCH_DTYPES

RECIPES = ["fp32", "bf16", "bf16_sr", "bf16_sr_master", "mixed"]
RATE = 1e-3
NAMES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


OWN = {
    "bf16 summed in fp32": ("precision=bf16", "precision.grad_accum_dtype=fp32"),
    "mixed summed in bf16": ("precision=mixed", "precision.grad_accum_dtype=bf16"),
    "bf16_sr summed in fp32": ("precision=bf16_sr", "precision.grad_accum_dtype=fp32"),
}
"""Recipes that a user can compose."""
ALL = {name: (f"precision={name}",) for name in RECIPES} | OWN


SIZE = ("model.vocab_size=512", "batch.micro_batch_size=2")


@pytest.fixture(params=ALL.values(), ids=ALL)
def config(request, compose, small):
    return resolve_config(compose(*small, *SIZE, *request.param))


built_in = pytest.mark.parametrize(
    "config",
    [
        pytest.param(groups, id=name, marks=[] if name in RECIPES else [pytest.mark.slow])
        for name, groups in ALL.items()
    ],
    indirect=True,
)
"""Run with recipes that a user composes only in the slow suite."""


@pytest.fixture(scope="module")
def fp32_metrics(compose, small):
    """Metrics of the batches in fp32."""
    config = resolve_config(compose(*small, *SIZE))
    return train(build(config), make_batches(config))


def build(config, **groups):
    changed = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in groups.items()
    }
    config = dataclasses.replace(config, **changed)
    engine = create_engine(config)
    engine.build(config)
    return engine


@pytest.fixture
def batches(config):
    return make_batches(config)


def make_batches(config):
    generator = np.random.default_rng(0)
    size = (config.batch.global_batch_size, config.batch.sequence_length)
    return [
        PackedSequences(generator.integers(0, config.model.vocab_size, size, np.int32))
        for _ in range(4)
    ]


def state(engine):
    return {shard.name: shard.tensor.detach().clone() for shard in engine.state_shards()}


def train(engine, batches, rate=RATE):
    return [engine.read_metrics(engine.train_step(batch, rate)) for batch in batches]


def only(dtypes):
    (dtype,) = set(dtypes)
    return NAMES[dtype]


def test_engine_dtypes_equal_the_recipe(config, batches, monkeypatch):
    engine = build(config)
    seen = {"gradients": [], "sums": [], "norm": [], "logits": [], "products": []}
    for weight in engine.model_parts[0].parameters():
        weight.register_hook(lambda gradient: seen["gradients"].append(gradient.dtype))
    watch(monkeypatch, torch, "rsqrt", seen["norm"])
    watch(monkeypatch, torch, "softmax", seen["logits"])
    watch(monkeypatch, torch.nn.functional, "linear", seen["products"])
    gradients = type(engine.params).collect_gradients
    monkeypatch.setattr(
        type(engine.params), "collect_gradients", lambda self: record(gradients(self), seen["sums"])
    )
    train(engine, batches[:1])
    precision = config.precision
    assert (
        only(weight.dtype for weight in engine.model_parts[0].parameters()) is precision.param_dtype
    )
    assert only(seen["products"]) is precision.compute_dtype
    assert only(seen["gradients"]) is precision.grad_dtype
    assert only(seen["sums"]) is precision.grad_accum_dtype
    updated = [tensor.dtype for tensor in engine.params.optimizer_params.values()]
    assert only(updated) is (precision.master_weight_dtype or precision.param_dtype)
    moments = [tensor.dtype for name, tensor in state(engine).items() if name.startswith("exp_avg")]
    assert only(moments) is precision.optimizer_state_dtype
    named = {operator.value for operator in precision.fp32_operators}
    assert only(seen["norm"]) is Dtype.fp32  # on a CPU whether it is named or not
    assert only(seen["logits"]) is (Dtype.fp32 if "loss" in named else precision.compute_dtype)


def watch(monkeypatch, module, name, seen):
    function = getattr(module, name)

    def watched(tensor, *rest, **options):
        seen.append(tensor.dtype)
        return function(tensor, *rest, **options)

    monkeypatch.setattr(module, name, watched)


def record(tensors, seen):
    seen.extend(tensor.dtype for tensor in tensors.values())
    return tensors


def test_persistent_memory_equals_the_recipe(config, batches, monkeypatch):
    engine = build(config)
    sizes = []
    gradients = type(engine.params).collect_gradients

    def measured(self):
        found = gradients(self)
        sizes.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    monkeypatch.setattr(type(engine.params), "collect_gradients", measured)
    train(engine, batches[:1])
    cost, count = (
        compute_bytes_per_parameter(config.precision, AdamWSpec()),
        count_parameters(config.model),
    )
    weights = sum(weight.nbytes for weight in engine.model_parts[0].parameters())
    assert weights == count * cost.weights
    assert sizes == [count * cost.gradients]
    masters = sum(tensor.nbytes for tensor in engine.params.optimizer_params.values())
    assert cost.master_weights in (0, masters / count)
    moments = [tensor.nbytes for name, tensor in state(engine).items() if name.startswith("exp_")]
    assert sum(moments) == count * cost.optimizer_state
    assert all(weight.grad is None for weight in engine.model_parts[0].parameters())


@built_in
@pytest.mark.slow_after(2)
def test_the_loss_decreases(config, batches):
    losses = [metrics.loss for metrics in train(build(config), batches[:1] * 6)]
    assert losses[-1] < losses[0] - 0.1


@built_in
@pytest.mark.slow_after(2)
def test_the_same_seed_gives_the_same_bits(config, batches):
    assert train(build(config), batches) == train(build(config), batches)


@pytest.mark.slow_after(4)
def test_resume_is_bit_identical(config, batches, tmp_path):
    engine = build(config)
    train(engine, batches[:2])
    path = checkpoint_store.save_checkpoint(tmp_path, 2, engine.state_shards(), {})
    other = build(config)
    checkpoint_store.load_checkpoint(path, other.state_shards())
    assert train(other, batches[2:]) == train(engine, batches[2:])
    found, expected = (dict(e.model_parts[0].named_parameters()) for e in (other, engine))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@built_in
@pytest.mark.slow_after(2)
def test_chunk_size_of_rounding_changes_no_bit(config, batches, monkeypatch):
    expected = train(build(config), batches)
    monkeypatch.setitem(stochastic_rounding._CHUNK_NUMEL, "cpu", 1000)
    assert train(build(config), batches) == expected


def test_model_weights_are_rounded_master_weights(config, batches):
    """Compare each weight with its rounded master weight."""
    engine = build(config)
    train(engine, batches[:2])
    for name, weight in engine.model_parts[0].named_parameters():
        master = engine.params.optimizer_params[name].float()
        if config.precision.rounding is RoundingMode.nearest:
            assert torch.equal(weight, master.to(weight.dtype))
        else:
            assert bool(((weight.float() - master).abs() <= 2**-7 * master.abs()).all())


@pytest.mark.slow_after(4)
def test_every_step_is_close_to_fp32(config, batches, fp32_metrics):
    for found, expected in zip(train(build(config), batches), fp32_metrics, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=2e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=3e-2)
        assert found.param_norm == pytest.approx(expected.param_norm, rel=2e-3)


@built_in
@pytest.mark.slow_after(2)
def test_checkpoints_are_interchangeable_between_recipes(config, batches, compose, small, tmp_path):
    engine = build(config)
    train(engine, batches[:3])
    path = checkpoint_store.save_checkpoint(tmp_path, 3, engine.state_shards(), {})
    loss = engine.read_metrics(engine.eval_step(batches[3])).loss
    for name in RECIPES:
        other = build(resolve_config(compose(*small, *SIZE, f"precision={name}")))
        checkpoint_store.load_checkpoint(path, other.state_shards())
        assert other.read_metrics(other.eval_step(batches[3])).loss == pytest.approx(loss, rel=2e-3)


STRONG_DECAY = 200.0
"""Decays a weight by a fifth per step at RATE, far above an update and the rounding of bf16."""


@built_in
def test_decay_of_norms(config, batches):
    """Compare one step with and without decay of norms; matrices decay in both."""
    decayed, apart = (
        build(config, optimizer={"weight_decay": STRONG_DECAY, "decay_norms": decay_norms})
        for decay_norms in (True, False)
    )
    before = state(apart)
    for engine in (decayed, apart):
        train(engine, batches[:1])
    found, expected = state(decayed), state(apart)
    names = [name for name in found if name.startswith("weights/")]
    norms = [name for name in names if found[name].dim() == 1]
    assert len(norms) == 2 * config.model.num_layers + 1
    for name in names:
        if name not in norms:
            assert torch.equal(found[name], expected[name]), name
            shrunk = float(found[name].float().norm() / before[name].float().norm())
            assert shrunk == pytest.approx(0.8, rel=2e-2), name
            continue
        assert bool(((expected[name].float() - 1).abs() < 0.01).all()), name
        assert bool(((found[name].float() - 0.8).abs() < 0.01).all()), name


SMALL_UPDATE = 1e-6
"""A rate at which an update is far below half the distance between two values of bf16."""


@pytest.mark.slow_after(4)
def test_small_updates_survive_unless_bf16_rounds_to_nearest(config, batches):
    engine = build(config, optimizer={"weight_decay": 0.0})
    before = state(engine)
    train(engine, batches[:1] * 4, SMALL_UPDATE)
    name = "weights/model.layers.0.mlp.gate_proj.weight"
    moved = (state(engine)[name].float() - before[name].float()).double()
    precision = config.precision
    survives = precision.rounding is RoundingMode.stochastic or Dtype.fp32 in (
        precision.param_dtype,
        precision.master_weight_dtype,
    )
    if not survives:
        assert float((moved != 0).double().mean()) < 0.05
        return
    gradient = state(engine)[name.replace("weights", "exp_avg")].double()
    assert float((moved * gradient).sum()) < 0
    # Adam's first steps have about the size of the learning rate
    assert 2 * SMALL_UPDATE < float(-(moved * gradient.sign()).mean()) < 5 * SMALL_UPDATE


@pytest.mark.parametrize("layout", ["whole", "in micro batches"])
@pytest.mark.slow_after(4)
def test_non_finite_gradients_change_no_bit(config, batches, layout, monkeypatch):
    size = {"whole": 8, "in micro batches": 2}[layout]
    spared, hit = (build(config, batch={"micro_batch_size": size}) for _ in range(2))
    train(hit, batches[:1])
    before = state(hit)
    with monkeypatch.context() as fault:
        gradients = type(hit.params).collect_gradients

        def poisoned(self):
            found = gradients(self)
            next(iter(found.values())).view(-1)[0] = float("inf")
            return found

        fault.setattr(type(hit.params), "collect_gradients", poisoned)
        (metrics,) = train(hit, batches[1:2])
    assert metrics.num_skipped == 1
    assert not np.isfinite(metrics.grad_norm)
    assert np.isfinite(metrics.param_norm)
    for name, tensor in state(hit).items():
        assert torch.equal(tensor, before[name]), name
    after = train(hit, batches[2:])
    expected = train(spared, [batches[0], *batches[2:]])[1:]
    assert [metrics.scalars for metrics in after] == [metrics.scalars for metrics in expected]
    assert after[-1].num_skipped == 1
