"""Log-probabilities and generation with every layout equal those of one process."""

import functools

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from hlat.inference.decode_batch import DecodeSequence
from hlat.inference.inference_model import InferenceModel
from tests.distributed.checks import batches, layers, losses_after
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

LAYOUTS = {
    "dp2": "dp=2",
    "dp2+zero1": "dp=2 zero=1",
    "tp2": "tp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "tp4, replicated heads": "tp=4",
    "pp2": "pp=2",
    "pp4": "pp=4",
    "interleaved": "pp=2 pipeline_schedule=interleaved stages_per_rank=3",
    "tp2+pp2": "tp=2 pp=2",
    "tp2+sp+pp2+dp2": "tp=2 sequence_parallel=true pp=2 dp=2",
}
DEFAULT = {"dp2+zero1", "tp2+sp+pp2+dp2"}
LARGE_INIT = "model.init_std=0.1"


def score_and_generate(config: Config):
    """Return scores, greedy sequences and samples."""
    engine = NativeEngine()
    engine.build(config, training=False)
    generator = np.random.default_rng(0)
    shared, *contexts = (generator.integers(0, 131, n).tolist() for n in (30, 1, 2, 9, 17, 25))
    contexts += [shared + context for context in contexts]
    endings = [generator.integers(0, 131, n).tolist() for n in (1, 1, 1, 4)]
    model = InferenceModel(engine, 200)
    greedy = model.generate(contexts, 10, is_finished=lambda tokens: tokens[-1] < 20)
    requests = [(context, ending) for context in contexts for ending in endings]
    requests += zip(contexts, greedy, strict=True)
    scores = model.score(requests)
    settings = {"is_finished": lambda tokens: False, "temperature": 0.8, "top_p": 0.95}
    samples = model.generate(contexts * 2, 10, **settings)
    batched = decode_in_batch(model, contexts)
    engine.close()
    return scores, greedy, samples, batched


def decode_in_batch(model: InferenceModel, contexts: list[list[int]]):
    """Return the tokens and scores of sequences that join a batch one after the other."""
    batch = model.create_batch()
    tokens = []
    for i, context in enumerate(contexts):
        sequence = DecodeSequence(
            context, 6, temperature=0.8 * (i % 2), num_top=2, score_prompt=True
        )
        prompt_scores, first = batch.add(sequence)
        tokens += [*prompt_scores, first]
        tokens += [token for _, token in batch.step()]
    return tokens


@pytest.fixture(scope="module")
def single_process(configure):
    found = functools.cache(lambda n: score_and_generate(configure("", n, LARGE_INIT)))
    return lambda layout: found(layers(layout))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=[] if name in DEFAULT else [pytest.mark.slow])
        for name, layout in LAYOUTS.items()
    ],
)
@pytest.mark.slow_after(1)
def test_results_equal_one_process(ranks: Ranks, configure, single_process, layout: str) -> None:
    config = configure(layout, LARGE_INIT)
    found = ranks.run(config.num_processes, score_and_generate, config)
    assert all(result == found[0] for result in found)
    scores, greedy, samples, batched = single_process(layout)
    assert found[0][1] == greedy
    assert found[0][2] == samples
    assert len({len(tokens) for tokens in greedy}) > 2
    assert {True, False} == {is_greedy for _, is_greedy in scores}
    for one, other in zip(found[0][0], scores, strict=True):
        assert one[0] == pytest.approx(other[0], rel=2e-6)
        assert one[1] == other[1]
    assert [one.token for one in found[0][3]] == [one.token for one in batched]
    for one, other in zip(found[0][3], batched, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-5)
        assert one.top_log_probs == pytest.approx(other.top_log_probs, abs=1e-5)


def evaluate(config: Config, training: bool) -> tuple[float, float]:
    engine = NativeEngine()
    engine.build(config, training)
    kinds = {shard.name.partition("/")[0] for shard in engine.state_shards()}
    assert (kinds == {"weights"}) is not training
    losses = losses_after(engine, batches(config, 1)[0])
    engine.close()
    return losses


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp=2 zero=1", marks=pytest.mark.slow),
        "dp=2 zero=3",
        "tp=2 sequence_parallel=true",
    ],
)
def test_loss_without_training_state(ranks: Ranks, configure, layout: str):
    config = configure(layout)
    assert ranks.run(2, evaluate, config, False) == ranks.run(2, evaluate, config, True)


def get_refusal(config: Config) -> str:
    engine = NativeEngine()
    engine.build(config)
    with pytest.raises(ConfigError) as error:
        engine.create_decode_state()
    engine.close()
    return str(error.value)


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp_is_rejected(ranks: Ranks, configure, zero: int) -> None:
    for message in ranks.run(2, get_refusal, configure(f"dp=2 zero={zero}")):
        assert f"decoding with parallelism.zero={zero} is not supported" in message
        assert "use parallelism.zero=1 or 0" in message
