"""Every precision recipe, read back from an engine that runs it."""

import dataclasses

import numpy as np
import pytest
import torch

from hlat.checkpoint import store
from hlat.config.precision import Dtype, Rounding
from hlat.config.resolve import resolve
from hlat.data.sequences import Sequences
from hlat.engine.create import create_engine
from hlat.engine.native import rounding
from hlat.engine.native.weights import DTYPES
from hlat.model.canonical import num_parameters
from hlat.precision import bytes_per_parameter

RECIPES = ["fp32", "bf16", "bf16_sr", "bf16_sr_master", "mixed"]
RATE = 1e-3
NAMES = {torch_dtype: dtype for dtype, torch_dtype in DTYPES.items()}


OWN = {
    "bf16 summed in fp32": ("precision=bf16", "precision.accumulation=fp32"),
    "mixed summed in bf16": ("precision=mixed", "precision.accumulation=bf16"),
    "bf16_sr summed in fp32": ("precision=bf16_sr", "precision.accumulation=fp32"),
}
"""Recipes that a user can put together from the table."""
ALL = {name: (f"precision={name}",) for name in RECIPES} | OWN


@pytest.fixture(params=ALL.values(), ids=ALL)
def config(request, compose, small):
    return resolve(compose(*small, *request.param, "batch.micro_batch_size=2"))


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
    generator = np.random.default_rng(0)
    size = (config.batch.global_batch_size, config.batch.sequence_length)
    return [
        Sequences(generator.integers(0, config.model.vocab_size, size, np.int32)) for _ in range(4)
    ]


def state(engine):
    return {chunk.name: chunk.tensor.detach().clone() for chunk in engine.chunks()}


def train(engine, batches, rate=RATE):
    return [engine.read(engine.train_step(batch, rate)) for batch in batches]


def only(dtypes):
    (dtype,) = set(dtypes)
    return NAMES[dtype]


def test_the_running_engine_has_the_dtypes_of_the_table(config, batches, monkeypatch):
    engine = build(config)
    seen = {"gradients": [], "sums": [], "norm": [], "logits": [], "products": []}
    for weight in engine.parts[0].parameters():
        weight.register_hook(lambda gradient: seen["gradients"].append(gradient.dtype))
    watch(monkeypatch, torch, "rsqrt", seen["norm"])
    watch(monkeypatch, torch, "softmax", seen["logits"])
    watch(monkeypatch, torch.nn.functional, "linear", seen["products"])
    gradients = type(engine.weights).gradients
    monkeypatch.setattr(
        type(engine.weights), "gradients", lambda self: record(gradients(self), seen["sums"])
    )
    train(engine, batches[:1])
    precision = config.precision
    assert only(weight.dtype for weight in engine.parts[0].parameters()) is precision.weights
    assert only(seen["products"]) is precision.compute
    assert only(seen["gradients"]) is precision.gradients
    assert only(seen["sums"]) is precision.accumulation
    updated = [tensor.dtype for tensor in engine.weights.updated.values()]
    assert only(updated) is (precision.master_weights or precision.weights)
    moments = [tensor.dtype for name, tensor in state(engine).items() if name.startswith("exp_avg")]
    assert only(moments) is precision.optimizer_state
    named = {operator.value for operator in precision.fp32_operators}
    assert only(seen["norm"]) is Dtype.fp32  # on a CPU whether it is named or not
    assert only(seen["logits"]) is (Dtype.fp32 if "loss" in named else precision.compute)


def watch(monkeypatch, module, name, seen):
    function = getattr(module, name)

    def watched(tensor, *rest, **options):
        seen.append(tensor.dtype)
        return function(tensor, *rest, **options)

    monkeypatch.setattr(module, name, watched)


def record(tensors, seen):
    seen.extend(tensor.dtype for tensor in tensors.values())
    return tensors


def test_what_lives_from_step_to_step_has_the_bytes_of_the_table(config, batches, monkeypatch):
    engine = build(config)
    sizes = []
    gradients = type(engine.weights).gradients

    def measured(self):
        found = gradients(self)
        sizes.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    monkeypatch.setattr(type(engine.weights), "gradients", measured)
    train(engine, batches[:1])
    cost, count = bytes_per_parameter(config.precision), num_parameters(config.model)
    weights = sum(weight.nbytes for weight in engine.parts[0].parameters())
    assert weights == count * cost.weights
    assert sizes == [count * cost.gradients]
    masters = sum(tensor.nbytes for tensor in engine.weights.updated.values())
    assert cost.master_weights in (0, masters / count)
    moments = [tensor.nbytes for name, tensor in state(engine).items() if name.startswith("exp_")]
    assert sum(moments) == count * cost.moments
    assert all(weight.grad is None for weight in engine.parts[0].parameters())


def test_it_learns(config, batches):
    losses = [numbers.loss for numbers in train(build(config), batches[:1] * 6)]
    assert losses[-1] < losses[0] - 0.1


def test_the_same_seed_gives_the_same_bits(config, batches):
    assert train(build(config), batches) == train(build(config), batches)


def test_saved_and_restored_it_goes_on_to_the_last_bit(config, batches, tmp_path):
    engine = build(config)
    train(engine, batches[:2])
    path = store.save(tmp_path, 2, engine.chunks(), {})
    other = build(config)
    store.restore(path, other.chunks())
    assert train(other, batches[2:]) == train(engine, batches[2:])
    found, expected = (dict(e.parts[0].named_parameters()) for e in (other, engine))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_size_of_the_pieces_that_are_rounded_changes_no_bit(config, batches, monkeypatch):
    whole = train(build(config), batches)
    monkeypatch.setitem(rounding._CHUNK, "cpu", 1000)
    assert train(build(config), batches) == whole


def test_weights_follow_from_what_is_updated(config, batches):
    """Each weight is its master rounded: to nearest, or to one of the two values around it."""
    engine = build(config)
    train(engine, batches[:2])
    for name, weight in engine.parts[0].named_parameters():
        master = engine.weights.updated[name].float()
        if config.precision.rounding is Rounding.nearest:
            assert torch.equal(weight, master.to(weight.dtype))
        else:
            assert bool(((weight.float() - master).abs() <= 2**-7 * master.abs()).all())


def test_from_the_first_step_on_it_stays_near_fp32(config, batches, compose, small):
    exact = build(resolve(compose(*small, "batch.micro_batch_size=2")))
    expected = train(exact, batches)
    for found, wanted in zip(train(build(config), batches), expected, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-3)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=3e-2)
        assert found.param_norm == pytest.approx(wanted.param_norm, rel=2e-3)


def test_a_state_of_any_recipe_can_go_on_under_any_other(config, batches, compose, small, tmp_path):
    engine = build(config)
    train(engine, batches[:3])
    path = store.save(tmp_path, 3, engine.chunks(), {})
    loss = engine.read(engine.eval_step(batches[3])).loss
    for name in RECIPES:
        other = build(resolve(compose(*small, f"precision={name}")))
        store.restore(path, other.chunks())
        assert other.read(other.eval_step(batches[3])).loss == pytest.approx(loss, rel=2e-3)


STRONG_DECAY = 200.0
"""At RATE a fifth of every decayed weight a step, far above an update and the rounding of bf16."""


def test_norms_decay_or_do_not_as_asked(config, batches):
    """Of two engines that differ in nothing else, after one step; matrices decay in both."""
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


def test_small_updates_are_kept_unless_bf16_is_rounded_to_nearest(config, batches):
    engine = build(config, optimizer={"weight_decay": 0.0})
    before = state(engine)
    train(engine, batches[:1] * 4, SMALL_UPDATE)
    name = "weights/model.layers.0.mlp.gate_proj.weight"
    moved = (state(engine)[name].float() - before[name].float()).double()
    precision = config.precision
    kept = precision.rounding is Rounding.stochastic or Dtype.fp32 in (
        precision.weights,
        precision.master_weights,
    )
    if not kept:
        assert float((moved != 0).double().mean()) < 0.05
        return
    gradient = state(engine)[name.replace("weights", "exp_avg")].double()
    assert float((moved * gradient).sum()) < 0
    # Adam's first steps are of about the size of the rate
    assert 2 * SMALL_UPDATE < float(-(moved * gradient.sign()).mean()) < 5 * SMALL_UPDATE


@pytest.mark.parametrize("layout", ["whole", "in micro batches"])
def test_gradients_that_are_not_finite_change_not_a_bit(config, batches, layout, monkeypatch):
    size = {"whole": 8, "in micro batches": 2}[layout]
    spared, hit = (build(config, batch={"micro_batch_size": size}) for _ in range(2))
    train(hit, batches[:1])
    before = state(hit)
    with monkeypatch.context() as fault:
        gradients = type(hit.weights).gradients

        def poisoned(self):
            found = gradients(self)
            next(iter(found.values())).view(-1)[0] = float("inf")
            return found

        fault.setattr(type(hit.weights), "gradients", poisoned)
        (numbers,) = train(hit, batches[1:2])
    assert numbers.num_skipped == 1
    assert not np.isfinite(numbers.grad_norm)
    assert np.isfinite(numbers.param_norm)
    for name, tensor in state(hit).items():
        assert torch.equal(tensor, before[name]), name
    after = train(hit, batches[2:])
    expected = train(spared, [batches[0], *batches[2:]])[1:]
    assert [numbers.measured for numbers in after] == [numbers.measured for numbers in expected]
    assert after[-1].num_skipped == 1
