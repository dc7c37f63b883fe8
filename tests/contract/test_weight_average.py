"""Moving average of the weights in the engine: values, skipped steps, evaluation, plan."""

import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.plan.memory_estimate import compute_checkpoint_bytes, estimate_memory
from tests.contract.test_recipes import SIZE, build, make_batches, state, train

DECAY = 0.75
SLOW = ["bf16", "bf16_sr_master", "mixed"]
every_recipe = pytest.mark.parametrize(
    "recipe",
    ["fp32", "bf16_sr", *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in SLOW)],
)


def configure(compose, small, *overrides: str):
    return resolve_config(compose(*small, *SIZE, f"optimizer.ema_decay={DECAY}", *overrides))


def select(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {
        name.partition("/")[2]: tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{key}/")
    }


@every_recipe
def test_the_average_is_that_of_torch_bit_for_bit(compose, small, recipe: str) -> None:
    config = configure(compose, small, f"precision={recipe}")
    engine = build(config)
    initial = state(engine)
    expected = {name: w.float() for name, w in select(initial, "weights").items()}
    assert all(torch.equal(select(initial, "ema")[name], w) for name, w in expected.items())
    update = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    for batch in make_batches(config):
        train(engine, [batch], 1e-2)
        weights = select(state(engine), "weights")
        update([*expected.values()], [weights[name].float() for name in expected], None)
    found = select(state(engine), "ema")
    assert found.keys() == weights.keys()
    assert all(average.dtype == torch.float32 for average in found.values())
    assert all(torch.equal(found[name], average) for name, average in expected.items())
    assert not all(torch.equal(found[name], weight.float()) for name, weight in weights.items())


@every_recipe
def test_a_skipped_step_changes_no_bit(compose, small, recipe: str) -> None:
    config = configure(compose, small, f"precision={recipe}")
    engine, batches = build(config), make_batches(config)
    train(engine, batches[:2], 1e-2)
    before = state(engine)
    weight = engine.params.model_params["layers.1.mlp.down_proj.weight"]
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    assert train(engine, batches[2:3], 1e-2)[0].num_skipped == 1
    handle.remove()
    after = state(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("overrides", [["optimizer.name=muon"], ["precision=bf16_sr"]])
def test_evaluation_uses_the_average_and_restores_the_weights(compose, small, overrides) -> None:
    config = configure(compose, small, *overrides)
    engine, batches = build(config), make_batches(config)
    train(engine, batches, 1e-2)
    before = state(engine)
    with engine.averaged_weights():
        averaged = engine.read_metrics(engine.eval_step(batches[0])).loss
    usual = engine.read_metrics(engine.eval_step(batches[0])).loss
    after = state(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = build(config)
    for key, expected in (("ema", averaged), ("weights", usual)):
        for shard in other.state_shards():
            kind, _, name = shard.name.partition("/")
            if kind == "weights":
                shard.tensor.detach().copy_(before[f"{key}/{name}"])
        assert other.read_metrics(other.eval_step(batches[0])).loss == expected
    assert averaged != usual


@every_recipe
def test_the_plan_has_the_bytes_of_the_average(compose, small, recipe: str) -> None:
    config = configure(compose, small, f"precision={recipe}")
    bytes_by_kind: dict[str, int] = {}
    for name, tensor in state(build(config)).items():
        kind = name.partition("/")[0]
        bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + tensor.nbytes
    del bytes_by_kind["updates"]
    assert compute_checkpoint_bytes(config) == sum(bytes_by_kind.values())
    del bytes_by_kind["weights"]
    assert estimate_memory(config).optimizer_state == sum(bytes_by_kind.values())
