"""Every layout trains like one process: losses, norms and gradients."""

import numpy as np
import pytest
import torch

from hlat.config.precision import Dtype
from hlat.model import hugging_face_config
from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUTS = {
    "dp2": "dp=2",
    "dp4": "dp=4",
    "dp2+zero1": "dp=2 zero=1",
    "tp2": "tp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "tp4": "tp=4",
    "tp4+sp": "tp=4 sequence_parallel=true",
    "pp2": "pp=2",
    "pp4": "pp=4",
    "tp2+pp2": "tp=2 pp=2",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
    "tp4+sp+dp2+zero1": "tp=4 sequence_parallel=true dp=2 zero=1",
    "dp2+zero2": "dp=2 zero=2",
    "dp4+zero3": "dp=4 zero=3",
    "tp2+pp2+dp2+zero3": "tp=2 pp=2 dp=2 zero=3",
}
SEVERAL = {
    "interleaved": "pp=2 pipeline_schedule=interleaved stages_per_rank=3",
    "zero bubble": "pp=2 pipeline_schedule=zero_bubble stages_per_rank=2",
    "interleaved+tp2+sp": "pp=2 pipeline_schedule=interleaved stages_per_rank=2 tp=2 sequence_parallel=true",
}
STEPS = 10
ONE_MICRO_BATCH = ["dp4", "tp4+sp", "pp4", "tp2+pp2+dp2+zero1", "dp4+zero3"]
"""Layouts that run without accumulation by default; the slow tests run all of them so."""


def _marks(name: str, accumulation: int) -> list[pytest.MarkDecorator]:
    quick = accumulation > 1 or name in ONE_MICRO_BATCH
    return [] if quick else [pytest.mark.slow]


CASES = [
    pytest.param(
        layout, accumulation, id=f"{name}-{accumulation}", marks=_marks(name, accumulation)
    )
    for name, layout in (LAYOUTS | SEVERAL).items()
    for accumulation in ((1, 4) if name in LAYOUTS else (2, 4))
]


@pytest.fixture(scope="module")
def alone(configure):
    """What one process finds with the layers that a layout is given."""
    found = {
        number: checks.train(configure("", number), STEPS)
        for number in (layers("pp=2"), layers(""))
    }
    return lambda layout: found[layers(layout)]


@pytest.mark.parametrize(("layout", "accumulation"), CASES)
def test_numbers_are_those_of_one_process(
    ranks: Ranks, configure, alone, layout: str, accumulation: int
) -> None:
    config = configure(layout, accumulation=accumulation)
    found = ranks.run(config.num_processes, checks.train, config, STEPS)
    for rows in found:
        for row, expected in zip(rows, alone(layout), strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
    assert all(rows == found[0] for rows in found)


ONE_STEP = ["tp4+sp+dp2+zero1", "tp2+pp2+dp2+zero1", "tp2+pp2+dp2+zero3", "tp4", "pp4", "dp4"]


@pytest.mark.parametrize("name", ONE_STEP)
def test_every_gradient_is_that_of_one_process(ranks: Ranks, configure, name: str) -> None:
    """The first moment after one step is the clipped gradient times 1 - beta1."""
    config = configure(LAYOUTS[name])
    found = ranks.run(config.num_processes, checks.slices, config, "exp_avg")
    found = checks.joined([slices for slices, _ in found])
    expected, _ = checks.slices(configure("", layers(LAYOUTS[name])), "exp_avg")
    expected = checks.joined([expected])
    assert found.keys() == expected.keys()
    for parameter, whole in expected.items():
        assert np.abs(found[parameter] - whole).max() <= 1e-5 * np.abs(whole).max(), parameter


@pytest.mark.parametrize("name", ["tp2+pp2+dp2+zero1", "tp4+sp", "dp4+zero3"])
def test_the_loss_is_that_of_transformers(ranks: Ranks, configure, name: str) -> None:
    config = configure(LAYOUTS[name])
    found = ranks.run(config.num_processes, checks.slices, config, "weights")
    weights = checks.joined([slices for slices, _ in found])
    settings = hugging_face_config.build_hf_config(config.model, 32, checks.EOS, Dtype.fp32)
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    peer.load_state_dict(
        {name.removeprefix("weights/"): torch.from_numpy(w) for name, w in weights.items()}
    )
    tokens = torch.from_numpy(checks.batches(config, 1)[0]).long()
    with torch.no_grad():
        expected = peer(input_ids=tokens, labels=tokens).loss.item()
    assert [loss for _, loss in found] == pytest.approx([expected] * len(found), rel=1e-6)


@pytest.mark.parametrize("layout", ["tp=2 sequence_parallel=true", "dp=2 zero=3"])
def test_compiled_layers_say_the_same(ranks: Ranks, configure, alone, layout: str) -> None:
    config = configure(layout, "compiler=inductor")
    for found in ranks.run(config.num_processes, checks.train, config, 4):
        for row, expected in zip(found[:4], alone(layout)[:4], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


# Layouts add up in other orders: about sqrt(steps) roundings of bf16, 2^-9, of the largest part
RECIPES = {"fp32": 1e-5, "mixed": 2e-3, "bf16": 4e-3, "bf16_sr": 4e-3, "bf16_sr_master": 4e-3}


STAGES = [(recipe, 1) for recipe in RECIPES] + [("mixed", 3), ("bf16", 2), ("bf16_sr", 3)]


@pytest.mark.parametrize(("recipe", "zero"), STAGES)
def test_every_recipe_runs_in_three_dimensions(
    ranks: Ranks, configure, recipe: str, zero: int
) -> None:
    layout = f"tp=2 sequence_parallel=true pp=2 dp=2 zero={zero}"
    config = configure(layout, f"precision={recipe}")
    found = ranks.run(8, checks.train, config, 6)
    alone = checks.train(configure("", layers(layout), f"precision={recipe}"), 6)
    assert all(rows == found[0] for rows in found)
    for row, expected in zip(found[0], alone, strict=True):
        assert row[0] == pytest.approx(expected[0], rel=RECIPES[recipe])
        assert row[1:] == pytest.approx(expected[1:], rel=10 * RECIPES[recipe])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_computed_again_says_the_same(ranks: Ranks, configure, alone, mode: str) -> None:
    layout = f"tp=2 sequence_parallel=true pp=2 activation_checkpointing={mode}"
    config = configure(layout)
    for found in ranks.run(config.num_processes, checks.train, config, 4):
        for row, expected in zip(found[:4], alone(layout)[:4], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def test_documents_are_heard_of_on_every_rank(ranks: Ranks, configure) -> None:
    """Masks of documents, and a loss whose terms differ from rank to rank."""
    masks = ("data.document_mask=true", "data.loss_mask=true")
    layout = "tp=2 sequence_parallel=true pp=2 dp=2"
    config = configure(layout, *masks)
    alone = checks.train(configure("", layers(layout), *masks), 4)
    for found in ranks.run(config.num_processes, checks.train, config, 4):
        for row, expected in zip(found, alone, strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("recipe", ["bf16_sr", "mixed"])
def test_copies_of_a_weight_stay_copies(ranks: Ranks, configure, recipe: str) -> None:
    """Replicated norms and key/value heads, and the weights of all replicas, after some steps."""
    config = configure("tp=4 sequence_parallel=true dp=2 zero=1", f"precision={recipe}")
    digests: dict[tuple, set[str]] = {}
    for found in ranks.run(8, checks.digests, config, 4):
        for key, digest in found.items():
            digests.setdefault(key, set()).add(digest)
    assert all(len(same) == 1 for same in digests.values())
