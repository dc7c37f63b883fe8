"""Optimizers of the package in the engine: comparison with torch, skipped steps, memory of the plan."""

import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.model.canonical_views import iter_row_views
from hlat.plan.memory_estimate import compute_checkpoint_bytes, estimate_memory
from tests.contract.test_recipes import RATE, SIZE, build, make_batches, state, train

MUON = ("optimizer.name=muon",)


def configure(compose, small, *overrides: str):
    return resolve_config(compose(*small, *SIZE, *MUON, *overrides))


def view_matrices(params: TrainableParameters, tensors) -> dict[str, torch.Tensor]:
    """Return copies of the canonical matrices of decoder layers."""
    return {
        rows.name: view.reshape(rows.num_rows, -1).clone()
        for name, tensor in tensors.items()
        if name.endswith("_proj.weight")
        for rows, view, _ in iter_row_views(params.shards[name].rows, tensor.detach())
    }


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_weights_are_those_of_torch_bit_for_bit(compose, small, monkeypatch, scale: str) -> None:
    config = configure(compose, small, f"optimizer.muon.scale={scale}")
    engine = build(config)
    params = engine.params
    theirs = {
        name: torch.nn.Parameter(matrix)
        for name, matrix in view_matrices(params, params.optimizer_params).items()
    }
    assert len(theirs) == 7 * config.model.num_layers
    reference = torch.optim.Muon(
        theirs.values(), lr=RATE, weight_decay=config.optimizer.weight_decay, adjust_lr_fn=scale
    )
    step = TrainableParameters.step

    def step_both(self, learning_rate, skip) -> None:
        gradients = {name: param.grad for name, param in self.optimizer_params.items()}
        for name, gradient in view_matrices(self, gradients).items():
            theirs[name].grad = gradient
        reference.step()
        step(self, learning_rate, skip)

    monkeypatch.setattr(TrainableParameters, "step", step_both)
    train(engine, make_batches(config))
    for name, matrix in view_matrices(params, params.optimizer_params).items():
        assert torch.equal(matrix, theirs[name]), name


def test_joint_matrices_are_updated_as_by_torch_bit_for_bit(compose, small, monkeypatch) -> None:
    config = configure(compose, small, "optimizer.muon.joint_qkv=true")
    engine = build(config)
    params = engine.params

    def view_joint(tensors) -> dict[str, torch.Tensor]:
        matrices = view_matrices(params, tensors)
        names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"]
        return {"qkv": torch.cat([matrices[name] for name in names])}

    (theirs,) = view_joint(params.optimizer_params).values()
    theirs = torch.nn.Parameter(theirs)
    reference = torch.optim.Muon(
        [theirs],
        lr=RATE,
        weight_decay=config.optimizer.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    step = TrainableParameters.step

    def step_both(self, learning_rate, skip) -> None:
        gradients = {name: param.grad for name, param in self.optimizer_params.items()}
        theirs.grad = view_joint(gradients)["qkv"]
        reference.step()
        step(self, learning_rate, skip)

    monkeypatch.setattr(TrainableParameters, "step", step_both)
    train(engine, make_batches(config))
    assert torch.equal(view_joint(params.optimizer_params)["qkv"], theirs)


RECIPES = ["fp32", "bf16_sr", "mixed"]
OPTIMIZERS = {
    "muon": [],
    "normuon": [],
    "soap": ["optimizer.soap.precondition_frequency=2"],
    "ademamix": ["optimizer=ademamix"],
    "schedule_free": ["optimizer=schedule_free", "schedule=constant"],
}


def every_optimizer(*default: str):
    """Run all optimizers in all recipes, in the default suite those of "optimizer-recipe"."""
    names = [(name, recipe) for name in OPTIMIZERS for recipe in RECIPES]
    cases = [
        pytest.param(*case, marks=[] if "-".join(case) in default else pytest.mark.slow)
        for case in names
    ]
    return pytest.mark.parametrize(("name", "recipe"), cases)


FAST = [
    *(f"muon-{recipe}" for recipe in RECIPES),
    "soap-bf16_sr",
    "schedule_free-bf16_sr",
    "ademamix-bf16_sr",
]


def count_bytes(tensors: dict[str, torch.Tensor], *omitted: str) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in tensors.items()
        if name.partition("/")[0] not in omitted
    )


def configure_optimizer(compose, small, name: str, recipe: str):
    overrides = f"optimizer.name={name}", f"precision={recipe}", *OPTIMIZERS[name]
    return resolve_config(compose(*small, *SIZE, *overrides))


@every_optimizer(*FAST)
def test_a_skipped_step_changes_no_bit(compose, small, name: str, recipe: str) -> None:
    config = configure_optimizer(compose, small, name, recipe)
    engine, batches = build(config), make_batches(config)
    train(engine, batches[:2])
    before = state(engine)
    weight = engine.params.model_params["layers.1.mlp.down_proj.weight"]
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    (metrics,) = train(engine, batches[2:3])
    handle.remove()
    assert metrics.num_skipped == 1
    after = state(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(engine, batches[3:])
    assert not torch.equal(
        before["weights/lm_head.weight"], state(engine)["weights/lm_head.weight"]
    )


@pytest.mark.parametrize("name", ["normuon", "soap"])
def test_a_skipped_first_step_changes_no_bit(compose, small, name: str) -> None:
    config = configure_optimizer(compose, small, name, "fp32")
    engine, batches = build(config), make_batches(config)
    before = state(engine)
    weight = engine.params.model_params["layers.1.mlp.down_proj.weight"]
    weight.register_hook(lambda gradient: gradient * float("nan"))
    assert train(engine, batches[:1])[0].num_skipped == 1
    after = state(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


@every_optimizer("soap-fp32", "schedule_free-fp32")
def test_every_step_can_be_resumed_bit_for_bit(compose, small, name: str, recipe: str) -> None:
    config = configure_optimizer(compose, small, name, recipe)
    engine, batches = build(config), make_batches(config)
    saved = []
    for batch in batches:
        saved.append(state(engine))
        train(engine, [batch])
    expected = state(engine)
    for step, tensors in enumerate(saved):
        other = build(config)
        for shard in other.state_shards():
            shard.tensor.detach().copy_(tensors[shard.name])
        other.params.sync_model_params()
        train(other, batches[step:])
        found = state(other)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found), step


@every_optimizer(*FAST)
def test_the_plan_has_the_bytes_of_the_state(compose, small, name: str, recipe: str) -> None:
    config = configure_optimizer(compose, small, name, recipe)
    found = count_bytes(state(build(config)), "weights", "updates")
    assert estimate_memory(config).optimizer_state == found


def test_the_plan_has_the_bytes_of_matrices_without_preconditioners(compose, small) -> None:
    config = configure_optimizer(compose, small, "soap", "mixed")
    config.optimizer.soap.max_preconditioner_dim = 64
    tensors = state(build(config))
    assert "left_gram/model.layers.0.self_attn.q_proj.weight" in tensors
    assert "left_gram/model.layers.0.mlp.up_proj.weight" not in tensors
    found = count_bytes(tensors, "weights", "updates")
    assert estimate_memory(config).optimizer_state == found
    assert compute_checkpoint_bytes(config) == count_bytes(tensors, "updates")
