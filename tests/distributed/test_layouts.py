"""Every layout trains like one process: losses, norms and gradients.

The default cases contain each pair of tp, sequence parallelism, pp, its schedule, dp, zero and
precision at least once; all other combinations are slow.
"""

import functools

import numpy as np
import pytest
import torch

from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.model.families import hugging_face_config
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
    "tp2+sp+pp2+dp2+zero3": "tp=2 sequence_parallel=true pp=2 dp=2 zero=3",
    "dp4+zero3+replicas": "dp=4 zero=3 dp_replicate=2",
    "pp2+dp4+zero3+replicas": "pp=2 dp=4 zero=3 dp_replicate=2",
    "pp2+dp4+zero2+replicas": "pp=2 dp=4 zero=2 dp_replicate=2",
    "tp2+sp+dp4+zero1+replicas": "tp=2 sequence_parallel=true dp=4 zero=1 dp_replicate=2",
}
SEVERAL_STAGES = {
    "interleaved": "pp=2 pipeline_schedule=interleaved stages_per_rank=3",
    "zero bubble": "pp=2 pipeline_schedule=zero_bubble stages_per_rank=2",
    "interleaved+tp2+sp": "pp=2 pipeline_schedule=interleaved stages_per_rank=2 tp=2 sequence_parallel=true",
}
ALL = LAYOUTS | SEVERAL_STAGES
STEPS = 4
DEFAULT = {
    *(("pp4", 4), ("dp2+zero2", 4)),
    *(("tp2+pp2+dp2+zero1", 4), ("tp4+sp+dp2+zero1", 1), ("tp2+sp+pp2+dp2+zero3", 1)),
    *(("interleaved+tp2+sp", 4), ("zero bubble", 2)),
    *(("dp4+zero3+replicas", 4), ("tp2+sp+dp4+zero1+replicas", 1)),
}
"""Layouts and numbers of micro batches of the default suite."""


def slow_unless(default: bool) -> list[pytest.MarkDecorator]:
    return [] if default else [pytest.mark.slow]


CASES = [
    pytest.param(
        name, accumulation, id=f"{name}-{accumulation}", marks=slow_unless(case in DEFAULT)
    )
    for name in ALL
    for case in ((name, 1 if name in LAYOUTS else 2), (name, 4))
    for accumulation in case[1:]
]


@pytest.fixture(scope="module")
def single_process(configure):
    """Return the record of one process with the layers and overrides of a layout."""

    @functools.cache
    def train(number: str, overrides: tuple[str, ...], steps: int) -> checks.TrainingRecord:
        return checks.train_and_record(configure("", number, *overrides), steps)

    return lambda layout, *overrides, steps=STEPS: train(layers(layout), overrides, steps)


def assert_rows_equal(found, expected, rel: float = 1e-5) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=rel)


@pytest.mark.parametrize(("name", "accumulation"), CASES)
@pytest.mark.slow_after(4)
def test_training_equals_one_process(
    ranks: Ranks, configure, single_process, name: str, accumulation: int
) -> None:
    """Compare losses and norms, and after one step each gradient and the loss of transformers.

    The first moment after one step is the clipped gradient times 1 - beta1.
    """
    config = configure(ALL[name], accumulation=accumulation)
    found = ranks.run(config.num_processes, checks.train_and_record, config, STEPS)
    expected = single_process(ALL[name])
    assert_rows_equal(found[0].rows, expected.rows)
    assert all(record.rows == found[0].rows for record in found)

    tensors, others = (
        checks.joined([record.shards for record in records]) for records in (found, [expected])
    )
    assert tensors.keys() == others.keys()
    for key, whole in others.items():
        if key.startswith("exp_avg/"):
            assert np.abs(tensors[key] - whole).max() <= 1e-5 * np.abs(whole).max(), key

    loss = compute_transformers_loss(config, tensors)
    assert [record.eval_loss for record in found] == pytest.approx([loss] * len(found), rel=1e-6)


def compute_transformers_loss(config: Config, tensors: dict[str, np.ndarray]) -> float:
    """Return the loss of the first batch."""
    settings = hugging_face_config.build_hf_config(config.model, 32, checks.EOS, Dtype.fp32)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    weights = {
        name.removeprefix("weights/"): torch.from_numpy(values)
        for name, values in tensors.items()
        if name.startswith("weights/")
    }
    reference.load_state_dict(weights)
    tokens = torch.from_numpy(checks.batches(config, 1)[0]).long()
    with torch.no_grad():
        return reference(input_ids=tokens, labels=tokens).loss.item()


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout",
    [
        "pp=3",
        pytest.param("pp=4", marks=pytest.mark.slow),
        pytest.param("pp=3 tp=2 sequence_parallel=true", marks=pytest.mark.slow),
        pytest.param("pp=4 dp=2 zero=1", marks=pytest.mark.slow),
        pytest.param("pp=3 dp=2 zero=3", marks=pytest.mark.slow),
    ],
)
def test_stages_between_the_embedding_and_a_tied_head(
    ranks: Ranks, configure, single_process, layout: str, tied: bool
) -> None:
    """Ranks of these stages have no embedding, and no peers to sum its gradient with."""
    head = f"model.tie_embeddings={str(tied).lower()}"
    config = configure(layout, head)
    found = ranks.run(config.num_processes, checks.train_and_record, config, STEPS)
    expected = single_process(layout, head)
    assert all(record.rows == found[0].rows for record in found)
    assert_rows_equal(found[0].rows, expected.rows)


@pytest.mark.slow  # tests/contract compiles the layers of one process
@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sequence_parallel=true", "dp=2 zero=3"])
def test_compiled_layers_equal_eager(ranks: Ranks, configure, single_process, layout: str) -> None:
    config = configure(layout, "compiler=inductor")
    for found in ranks.run(config.num_processes, checks.train, config, 2):
        assert_rows_equal(found[:2], single_process(layout).rows[:2])


# Layouts add up in other orders: about sqrt(steps) roundings of bf16, 2^-9, of the largest part
RECIPES = {"fp32": 1e-5, "mixed": 2e-3, "bf16": 4e-3, "bf16_sr": 4e-3, "bf16_sr_master": 4e-3}
DEFAULT_RECIPES = [
    *(
        pytest.param(
            *(recipe, "tp=2 sequence_parallel=true dp=2 zero=1"),
            marks=slow_unless(recipe in ("mixed", "bf16_sr_master")),
        )
        for recipe in ("mixed", "bf16", "bf16_sr", "bf16_sr_master")
    ),
    *((recipe, "pp=2 dp=2 zero=3") for recipe in ("mixed", "bf16_sr")),
    ("bf16_sr", "dp=4 zero=3 dp_replicate=2"),
]
EIGHT_RANKS = "tp=2 sequence_parallel=true pp=2 dp=2"
RECIPE_CASES = [
    *DEFAULT_RECIPES,
    *(
        pytest.param(recipe, f"{EIGHT_RANKS} zero={zero}", marks=pytest.mark.slow)
        for recipe, zero in [
            *((recipe, 1) for recipe in RECIPES),
            *(("mixed", 3), ("bf16", 2), ("bf16_sr", 3)),
        ]
    ),
    *(
        pytest.param(recipe, f"dp=4 zero={zero} dp_replicate=2", marks=pytest.mark.slow)
        for recipe, zero in [
            *((recipe, 1) for recipe in RECIPES),
            *((recipe, 3) for recipe in ("mixed", "bf16")),
        ]
    ),
    pytest.param("bf16", "pp=2 dp=2 zero=3", marks=pytest.mark.slow),
    pytest.param("bf16_sr_master", "pp=2", marks=pytest.mark.slow),  # FSDP does not support it
]


@pytest.mark.parametrize(("recipe", "layout"), RECIPE_CASES)
@pytest.mark.slow_after(2)
def test_every_recipe_trains_in_several_dimensions(
    ranks: Ranks, configure, single_process, recipe: str, layout: str
) -> None:
    config = configure(layout, f"precision={recipe}")
    found = ranks.run(config.num_processes, checks.train, config, 2)
    expected = single_process(layout, f"precision={recipe}", steps=2).rows
    assert all(rows == found[0] for rows in found)
    for row, other in zip(found[0], expected, strict=True):
        assert row[0] == pytest.approx(other[0], rel=RECIPES[recipe])
        assert row[1:] == pytest.approx(other[1:], rel=10 * RECIPES[recipe])


@pytest.mark.parametrize("mode", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_activation_checkpointing_changes_no_result(
    ranks: Ranks, configure, single_process, mode: str
) -> None:
    layout = f"tp=2 sequence_parallel=true pp=2 activation_checkpointing={mode}"
    config = configure(layout)
    for found in ranks.run(config.num_processes, checks.train, config, 2):
        assert_rows_equal(found[:2], single_process(layout).rows[:2])


@pytest.mark.slow
def test_document_and_loss_masks_apply_on_every_rank(
    ranks: Ranks, configure, single_process
) -> None:
    """Terms of the loss differ between ranks."""
    masks = ("data.document_mask=true", "data.loss_mask=true")
    config = configure(EIGHT_RANKS, *masks)
    expected = single_process(EIGHT_RANKS, *masks).rows
    for found in ranks.run(config.num_processes, checks.train, config, 2):
        assert_rows_equal(found[:2], expected[:2])


@pytest.mark.parametrize("recipe", ["bf16_sr", pytest.param("mixed", marks=pytest.mark.slow)])
def test_replicas_of_a_weight_stay_identical(ranks: Ranks, configure, recipe: str) -> None:
    """Compare replicated norms and key/value heads, and the weights of all data-parallel ranks."""
    config = configure("tp=4 sequence_parallel=true dp=2 zero=1", f"precision={recipe}")
    digests: dict[tuple, set[str]] = {}
    for found in ranks.run(8, checks.digests, config, 3):
        for key, digest in found.items():
            digests.setdefault(key, set()).add(digest)
    assert all(len(same) == 1 for same in digests.values())
