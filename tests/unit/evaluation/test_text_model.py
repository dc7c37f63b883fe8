"""Scores and texts against transformers on the same weights, and that batches change nothing."""

import numpy as np
import pytest
import torch

from hlat.config.precision import Dtype
from hlat.config.resolve import resolve
from hlat.engine.create import create_engine
from hlat.engine.native.texts import NativeTexts
from hlat.evaluation.text_model import TextModel
from hlat.model import hugging_face

transformers = pytest.importorskip("transformers")

MODELS = {
    "gqa": (96, 104, 6, 2, 131),
    "mha": (64, 96, 4, 4, 131),
    "one kv head": (60, 88, 3, 1, 257),
    "tied": (64, 96, 4, 2, 131),
}
NEVER = lambda tokens: False  # noqa: E731


@pytest.fixture(scope="module")
def configure(compose):
    """A small model that is sure of what it says, as one that was trained."""

    def make(name="gqa", *overrides):
        keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        sizes = zip((*keys, "vocab_size"), MODELS[name], strict=True)
        return resolve(
            compose(
                *(f"model.{key}={size}" for key, size in sizes),
                "model.num_layers=3",
                "model.init_std=0.1",
                f"model.tie_embeddings={str(name == 'tied').lower()}",
                "batch.global_batch_size=2",
                "batch.micro_batch_size=1",
                "batch.sequence_length=32",
                *overrides,
            )
        )

    return make


@pytest.fixture(scope="module")
def built(configure):
    """Engines by model, and the same weights in transformers, in double precision."""
    engines = {}

    def make(name="gqa", *overrides):
        if (key := (name, *overrides)) not in engines:
            config = configure(*key)
            engine = create_engine(config)
            engine.build(config)
            engines[key] = engine, _peer(config, engine)
        return engines[key]

    yield make
    for engine, _ in engines.values():
        engine.close()


def _peer(config, engine):
    settings = hugging_face.to_config(config.model, 128, 0, Dtype.fp32)
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    weights = {
        chunk.name.removeprefix("weights/"): chunk.tensor.detach().reshape(chunk.shape).float()
        for chunk in engine.chunks()
        if chunk.name.startswith("weights/")
    }
    missing, _ = peer.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"])
    return peer.double().eval()


def _texts(vocab_size, lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def _expected(peer, context, continuation):
    """One request alone, without a cache."""
    tokens = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = peer(tokens).logits[0, len(context) - 1 : -1]
    aims = torch.tensor(continuation)
    found = logits.log_softmax(-1)[range(len(aims)), aims].sum().item()
    return found, bool((logits.argmax(-1) == aims).all())


def _requests(peer, vocab_size):
    """Endings of a question, one token each and several; texts inside others; the likeliest ones."""
    shared, *contexts = _texts(vocab_size, [40, 1, 2, 7, 19, 23, 31])
    contexts += [shared[:30], shared, shared + contexts[3], shared + contexts[4]]
    endings = _texts(vocab_size, [1, 1, 1, 4, 9, 2], seed=1)
    requests = [(context, ending) for context in contexts for ending in endings]
    return requests + [(context, _likeliest(peer, context, 5)) for context in contexts]


def _likeliest(peer, prompt, num_tokens):
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(tokens)
    found = peer.generate(tokens, attention_mask=mask, max_new_tokens=num_tokens, **settings)
    return found[0, len(prompt) :].tolist()


def _same(found, expected, rel=1e-6):
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=rel, abs=rel)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers(built, name):
    engine, peer = built(name)
    requests = _requests(peer, MODELS[name][-1])
    expected = [_expected(peer, *request) for request in requests]
    assert {likeliest for _, likeliest in expected} == {True, False}
    _same(TextModel(engine).score(requests), expected)


@pytest.mark.parametrize("tokens_at_once", [1, 100, 1 << 20])
def test_neither_batches_nor_order_nor_company_change_a_score(built, tokens_at_once):
    engine, peer = built()
    requests = _requests(peer, MODELS["gqa"][-1])
    expected = TextModel(engine).score(requests)
    model = TextModel(engine, tokens_at_once)
    _same(model.score(requests), expected)
    _same(model.score(requests[::-1]), expected[::-1])
    _same([model.score([request])[0] for request in requests[::5]], expected[::5])


def test_what_texts_share_is_read_once(built, monkeypatch):
    engine, _ = built()
    shared, *questions = _texts(131, [100, 20, 20, 20])
    endings = _texts(131, [1, 1, 1, 1], seed=1)
    read = []
    extend = NativeTexts.extend

    def counting(self, tokens, counts):
        read.append(counts.sum())
        extend(self, tokens, counts)

    monkeypatch.setattr(NativeTexts, "extend", counting)
    TextModel(engine).score([(shared + question, e) for question in questions for e in endings])
    assert sum(read) == 100 + 3 * 20


@pytest.mark.parametrize("at_once", [1, 70])
def test_logits_are_made_a_few_rows_at_a_time(built, monkeypatch, at_once):
    from hlat.model import prediction

    engine, peer = built()
    requests = _requests(peer, 131)
    expected = TextModel(engine).score(requests)
    monkeypatch.setattr(prediction, "rows_at_once", lambda _: at_once)
    _same(TextModel(engine).score(requests), expected)


def test_a_few_texts_pass_through_the_layers_at_a_time(built, monkeypatch):
    from hlat.engine.native import texts

    engine, peer = built()
    requests, prompts = _requests(peer, 131), _texts(131, [5, 5, 9, 2, 30])
    model = TextModel(engine)
    expected = model.score(requests), model.generate(prompts, 9, finished=NEVER)
    monkeypatch.setattr(texts, "_TOKENS_PER_PASS", 64)
    _same(model.score(requests), expected[0])
    assert model.generate(prompts, 9, finished=NEVER) == expected[1]


def test_texts_without_room_are_read_once(built):
    engine, _ = built()
    tokens, counts = np.array(_texts(131, [9, 9]), np.int32), np.array([9, 6])
    rows, places = np.array([0, 0, 1]), np.array([0, 8, 5])
    found = []
    for room in (0, 9):
        texts = engine.texts().select(np.zeros(2, np.int64), room)
        texts.extend(tokens, counts)
        found.append(texts.log_probs(rows, places, np.array([3, 4, 5])))
        with pytest.raises(AssertionError, match="no room"):
            texts.extend(tokens, counts)
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_nothing_is_certain_and_follows_anything(built):
    engine, _ = built()
    assert TextModel(engine).score([([1], []), ([2, 3], [])]) == [(0.0, True)] * 2
    assert TextModel(engine).score([]) == []


def test_a_continuation_of_nothing_is_refused(built):
    engine, _ = built()
    with pytest.raises(ValueError, match="request 1 has no context"):
        TextModel(engine).score([([1], [2]), ([], [2])])


@pytest.mark.parametrize("recipe", ["bf16", "mixed", "bf16_sr", "bf16_sr_master"])
def test_every_recipe_scores_with_the_weights_that_it_computes_with(built, recipe):
    engine, peer = built("gqa", f"precision={recipe}")
    requests = _requests(peer, 131)
    for found, request in zip(TextModel(engine).score(requests), requests, strict=True):
        assert found[0] == pytest.approx(_expected(peer, *request)[0], rel=0.1, abs=0.3)


def test_scores_follow_training_and_leave_it_alone(configure):
    from hlat.data.sequences import Sequences

    config = configure()
    tokens = np.arange(64, dtype=np.int32).reshape(2, 32)
    requests = [(list(range(9)), [9]), (list(range(40, 44)), [44, 45])]
    losses = []
    for scored in (False, True):
        engine = create_engine(config)
        engine.build(config)
        model = TextModel(engine)
        scores = []
        for _ in range(8):
            losses.append(engine.read(engine.train_step(Sequences(tokens), 1e-2)).loss)
            if scored:
                scores.append(model.score(requests))
        engine.close()
    assert losses[:8] == losses[8:]
    assert all(
        after[0] > before[0] + 1 for before, after in zip(scores[0], scores[-1], strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_text_is_that_of_transformers(built, name):
    engine, peer = built(name)
    prompts = _texts(MODELS[name][-1], [1, 3, 3, 17, 40])
    found = TextModel(engine).generate(prompts, 30, finished=NEVER)
    assert found == [_likeliest(peer, prompt, 30) for prompt in prompts]


def test_each_text_ends_by_itself(built):
    engine, _ = built()
    prompts = _texts(131, [5, 5, 9, 2, 30, 14, 8])
    model = TextModel(engine)
    whole = model.generate(prompts, 20, finished=NEVER)
    ended = model.generate(prompts, 20, finished=lambda tokens: tokens[-1] % 5 == 0)
    for tokens, all_of_them in zip(ended, whole, strict=True):
        ends = [i for i, token in enumerate(all_of_them) if token % 5 == 0]
        assert tokens == all_of_them[: ends[0] + 1 if ends else 20]
    assert len({len(tokens) for tokens in ended}) > 2


def test_what_is_drawn_depends_on_seed_and_number_alone(built):
    engine, _ = built()
    prompts = [*_texts(131, [5, 9, 2, 30]), *_texts(131, [5] * 3, seed=3)] * 2
    settings = {"finished": NEVER, "temperature": 0.8, "top_p": 0.95}
    found = TextModel(engine).generate(prompts, 12, **settings)
    assert found == TextModel(engine, 60).generate(prompts, 12, **settings)
    assert found[7:] == TextModel(engine).generate(
        prompts[7:], 12, numbers=range(7, 14), **settings
    )
    assert [tokens[:5] for tokens in found] == TextModel(engine).generate(prompts, 5, **settings)
    assert all(one != other for one, other in zip(found[:7], found[7:], strict=True))
    assert found != TextModel(engine).generate(prompts, 12, seed=1, **settings)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (2.0, 0.3)])
def test_tokens_are_drawn_as_often_as_they_are_likely(built, temperature, top_p):
    """Against probabilities worked out in double precision; 5 sigma."""
    engine, peer = built()
    (prompt,) = _texts(131, [11])
    drawn = TextModel(engine).generate(
        [prompt] * 4000, 1, finished=NEVER, temperature=temperature, top_p=top_p
    )
    with torch.no_grad():
        logits = peer(torch.tensor([prompt])).logits[0, -1]
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    kept = probabilities.where(probabilities.cumsum(0) - probabilities < top_p, 0)
    expected = torch.zeros(131, dtype=torch.float64).scatter(0, order, kept / kept.sum())
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=131)
    assert not counts[expected == 0].any()
    spread = (4000 * expected * (1 - expected)).sqrt()
    assert ((counts - 4000 * expected).abs() <= 5 * spread + 1).all()
    assert int((expected > 0).sum()) > 1


@pytest.mark.filterwarnings("ignore")  # torch's own, several
def test_compiled_layers_are_left_alone(configure, built):
    """Texts of many lengths run uncompiled, and training compiles nothing anew after them."""
    from torch._dynamo.utils import counters

    from hlat.data.sequences import Sequences

    config = configure("gqa", "compiler=inductor")
    engine = create_engine(config)
    engine.build(config)
    _, peer = built()
    requests = _requests(peer, 131)
    tokens = Sequences(np.arange(64, dtype=np.int32).reshape(2, 32))
    engine.train_step(tokens, 0.0)
    graphs = counters["stats"]["unique_graphs"]
    _same(TextModel(engine).score(requests), [_expected(peer, *request) for request in requests])
    engine.train_step(tokens, 0.0)
    engine.close()
    assert counters["stats"]["unique_graphs"] == graphs > 0
