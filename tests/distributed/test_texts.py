"""Every layout scores and writes texts like one process."""

import numpy as np
import pytest

from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.engine.native.engine import NativeEngine
from hlat.evaluation.text_model import TextModel
from tests.distributed.checks import batches, layers, losses_after
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUTS = {
    "dp2": "dp=2",
    "dp2+zero1": "dp=2 zero=1",
    "tp2": "tp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "tp4, where ranks share a head": "tp=4",
    "pp2": "pp=2",
    "pp4": "pp=4",
    "interleaved": "pp=2 pipeline_schedule=interleaved stages_per_rank=3",
    "tp2+pp2": "tp=2 pp=2",
    "tp2+sp+pp2+dp2": "tp=2 sequence_parallel=true pp=2 dp=2",
}
SURE = "model.init_std=0.1"


def read_and_write(config: Config):
    """Scores, likeliest texts, and drawn texts, of weights alone."""
    engine = NativeEngine()
    engine.build(config, trains=False)
    generator = np.random.default_rng(0)
    shared, *contexts = (generator.integers(0, 131, n).tolist() for n in (30, 1, 2, 9, 17, 25))
    contexts += [shared + context for context in contexts]
    endings = [generator.integers(0, 131, n).tolist() for n in (1, 1, 1, 4)]
    model = TextModel(engine, 200)
    likeliest = model.generate(contexts, 10, finished=lambda tokens: tokens[-1] < 20)
    requests = [(context, ending) for context in contexts for ending in endings]
    requests += zip(contexts, likeliest, strict=True)
    scores = model.score(requests)
    settings = {"finished": lambda tokens: False, "temperature": 0.8, "top_p": 0.95}
    drawn = model.generate(contexts * 2, 10, **settings)
    engine.close()
    return scores, likeliest, drawn


@pytest.fixture(scope="module")
def alone(configure):
    found = {n: read_and_write(configure("", n, SURE)) for n in (layers("pp=2"), layers(""))}
    return lambda layout: found[layers(layout)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_answers_are_those_of_one_process(ranks: Ranks, configure, alone, layout: str) -> None:
    config = configure(layout, SURE)
    found = ranks.run(config.num_processes, read_and_write, config)
    assert all(answers == found[0] for answers in found)
    scores, likeliest, drawn = alone(layout)
    assert found[0][1] == likeliest
    assert found[0][2] == drawn
    assert len({len(tokens) for tokens in likeliest}) > 2
    assert {True, False} == {sure for _, sure in scores}
    for one, other in zip(found[0][0], scores, strict=True):
        assert one[0] == pytest.approx(other[0], rel=2e-6)
        assert one[1] == other[1]


def evaluated(config: Config, trains: bool) -> tuple[float, float]:
    engine = NativeEngine()
    engine.build(config, trains)
    kinds = {chunk.name.partition("/")[0] for chunk in engine.chunks()}
    assert (kinds == {"weights"}) is not trains
    losses = losses_after(engine, batches(config, 1)[0])
    engine.close()
    return losses


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "dp=2 zero=3", "tp=2 sequence_parallel=true"])
def test_weights_alone_have_the_loss_of_those_that_train(ranks: Ranks, configure, layout: str):
    config = configure(layout)
    assert ranks.run(2, evaluated, config, False) == ranks.run(2, evaluated, config, True)


def refused(config: Config) -> str:
    engine = NativeEngine()
    engine.build(config)
    with pytest.raises(ConfigError) as error:
        engine.texts()
    engine.close()
    return str(error.value)


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_without_whole_layers_refuse(ranks: Ranks, configure, zero: int) -> None:
    for message in ranks.run(2, refused, configure(f"dp=2 zero={zero}")):
        assert f"parallelism.zero={zero} leaves no" in message
        assert "set parallelism.zero=1 or 0" in message
