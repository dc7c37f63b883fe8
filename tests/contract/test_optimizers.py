"""Optimizers of the package in the engine: comparison with torch, skipped steps, memory of the plan."""

import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.model.canonical_views import iter_row_views
from hlat.plan.memory_estimate import estimate_memory
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


@pytest.mark.parametrize("recipe", ["fp32", "bf16_sr", "mixed"])
def test_a_skipped_step_changes_no_bit(compose, small, recipe: str) -> None:
    config = configure(compose, small, f"precision={recipe}")
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


@pytest.mark.parametrize("recipe", ["fp32", "bf16_sr", "mixed"])
def test_the_plan_has_the_bytes_of_the_state(compose, small, recipe: str) -> None:
    config = configure(compose, small, f"precision={recipe}")
    found = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in state(build(config)).items()
        if name.partition("/")[0] not in ("weights", "updates")
    )
    assert estimate_memory(config).optimizer_state == found
