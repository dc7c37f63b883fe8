"""Log-probabilities and generation against transformers, independent of the batches."""

from functools import partial

import numpy as np
import pytest
import torch

from hlat.config.precision import Dtype
from hlat.config.resolve import resolve_config
from hlat.engine.engine_factory import create_engine
from hlat.engine.native.decoding import NativeDecodeState
from hlat.inference.inference_model import InferenceModel, build_stop_check
from hlat.model.families import hugging_face_config

transformers = pytest.importorskip("transformers")

MODELS = {
    "gqa": (96, 104, 6, 2, 131),
    "mha": (64, 96, 4, 4, 131),
    "one kv head": (60, 88, 3, 1, 257),
    "tied": (64, 96, 4, 2, 131),
}
VARIANTS = [
    "gqa",
    "tied",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("mha", "one kv head")),
]
NEVER = lambda tokens: False  # noqa: E731


@pytest.fixture(scope="module")
def configure(compose):
    """Return a small model with large initial values, so that its predictions are distinct."""

    def make(name="gqa", *overrides):
        keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        sizes = zip((*keys, "vocab_size"), MODELS[name], strict=True)
        return resolve_config(
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
    """Return an engine and a transformers model with the same weights in double precision."""
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
    settings = hugging_face_config.build_hf_config(config.model, 128, 0, Dtype.fp32)
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    weights = {
        shard.name.removeprefix("weights/"): shard.tensor.detach().reshape(shard.shape).float()
        for shard in engine.state_shards()
        if shard.name.startswith("weights/")
    }
    missing, _ = peer.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"])
    return peer.double().eval()


def _sample_sequences(vocab_size, lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def _expected(peer, context, continuation):
    """Compute one request without a cache."""
    tokens = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = peer(tokens).logits[0, len(context) - 1 : -1]
    aims = torch.tensor(continuation)
    found = logits.log_softmax(-1)[range(len(aims)), aims].sum().item()
    return found, bool((logits.argmax(-1) == aims).all())


def _requests(peer, vocab_size):
    """Return requests with short, long, nested and greedy continuations."""
    shared, *contexts = _sample_sequences(vocab_size, [40, 1, 2, 7, 19, 23, 31])
    contexts += [shared[:30], shared, shared + contexts[3], shared + contexts[4]]
    endings = _sample_sequences(vocab_size, [1, 1, 1, 4, 9, 2], seed=1)
    requests = [(context, ending) for context in contexts for ending in endings]
    return requests + [(context, _generate_greedily(peer, context, 5)) for context in contexts]


def _generate_greedily(peer, prompt, num_tokens):
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(tokens)
    found = peer.generate(tokens, attention_mask=mask, max_new_tokens=num_tokens, **settings)
    return found[0, len(prompt) :].tolist()


def _assert_close(found, expected, rel=1e-6):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=rel, abs=rel)


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_equal_transformers(built, name):
    engine, peer = built(name)
    requests = _requests(peer, MODELS[name][-1])
    expected = [_expected(peer, *request) for request in requests]
    assert {greedy for _, greedy in expected} == {True, False}
    _assert_close(InferenceModel(engine).score(requests), expected)


@pytest.mark.parametrize("max_batch_tokens", [1, 100, 1 << 20])
def test_scores_are_independent_of_batches(built, max_batch_tokens):
    engine, peer = built()
    requests = _requests(peer, MODELS["gqa"][-1])
    expected = InferenceModel(engine).score(requests)
    model = InferenceModel(engine, max_batch_tokens)
    _assert_close(model.score(requests), expected)
    _assert_close(model.score(requests[::-1]), expected[::-1])
    _assert_close([model.score([request])[0] for request in requests[::5]], expected[::5])


def test_shared_prefixes_are_computed_once(built, monkeypatch):
    engine, _ = built()
    shared, *questions = _sample_sequences(131, [100, 20, 20, 20])
    endings = _sample_sequences(131, [1, 1, 1, 1], seed=1)
    num_tokens = []
    append = NativeDecodeState.append

    def count(self, tokens, lengths):
        num_tokens.append(lengths.sum())
        append(self, tokens, lengths)

    monkeypatch.setattr(NativeDecodeState, "append", count)
    InferenceModel(engine).score(
        [(shared + question, e) for question in questions for e in endings]
    )
    assert sum(num_tokens) == 100 + 3 * 20


@pytest.mark.parametrize("chunk_size", [1, 70])
def test_logits_are_computed_in_chunks(built, monkeypatch, chunk_size):
    from hlat.model import token_sampling

    engine, peer = built()
    requests = _requests(peer, 131)
    expected = InferenceModel(engine).score(requests)
    monkeypatch.setattr(token_sampling, "logit_chunk_size", lambda _: chunk_size)
    _assert_close(InferenceModel(engine).score(requests), expected)


def test_forward_passes_are_chunked(built, monkeypatch):
    from hlat.engine.native import decoding

    engine, peer = built()
    requests, prompts = _requests(peer, 131), _sample_sequences(131, [5, 5, 9, 2, 30])
    model = InferenceModel(engine)
    expected = model.score(requests), model.generate(prompts, 9, is_finished=NEVER)
    monkeypatch.setattr(decoding, "_MAX_TOKENS_PER_FORWARD", 64)
    _assert_close(model.score(requests), expected[0])
    assert model.generate(prompts, 9, is_finished=NEVER) == expected[1]


def test_decode_state_without_capacity(built):
    engine, _ = built()
    tokens, counts = np.array(_sample_sequences(131, [9, 9]), np.int32), np.array([9, 6])
    rows, places = np.array([0, 0, 1]), np.array([0, 8, 5])
    found = []
    for capacity in (0, 9):
        state = engine.create_decode_state().select(np.zeros(2, np.int64), capacity)
        state.append(tokens, counts)
        found.append(state.compute_log_probs(rows, places, np.array([3, 4, 5])))
        with pytest.raises(AssertionError, match="exceed the capacity"):
            state.append(tokens, counts)
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_empty_continuations_and_requests(built):
    engine, _ = built()
    assert InferenceModel(engine).score([([1], []), ([2, 3], [])]) == [(0.0, True)] * 2
    assert InferenceModel(engine).score([]) == []


def test_empty_context_is_rejected(built):
    engine, _ = built()
    with pytest.raises(ValueError, match="request 1 has no context"):
        InferenceModel(engine).score([([1], [2]), ([], [2])])


@pytest.mark.parametrize(
    "recipe",
    [
        "mixed",
        "bf16_sr",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("bf16", "bf16_sr_master")),
    ],
)
def test_scores_with_every_recipe(built, recipe):
    engine, peer = built("gqa", f"precision={recipe}")
    requests = _requests(peer, 131)
    for found, request in zip(InferenceModel(engine).score(requests), requests, strict=True):
        assert found[0] == pytest.approx(_expected(peer, *request)[0], rel=0.1, abs=0.3)


def test_scores_follow_training_without_side_effects(configure):
    from hlat.data.packed_sequences import PackedSequences

    config = configure()
    tokens = np.arange(64, dtype=np.int32).reshape(2, 32)
    requests = [(list(range(9)), [9]), (list(range(40, 44)), [44, 45])]
    losses = []
    for scored in (False, True):
        engine = create_engine(config)
        engine.build(config)
        model = InferenceModel(engine)
        scores = []
        for _ in range(8):
            losses.append(
                engine.read_metrics(engine.train_step(PackedSequences(tokens), 1e-2)).loss
            )
            if scored:
                scores.append(model.score(requests))
        engine.close()
    assert losses[:8] == losses[8:]
    assert all(
        after[0] > before[0] + 1 for before, after in zip(scores[0], scores[-1], strict=True)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_decoding_equals_transformers(built, name):
    engine, peer = built(name)
    prompts = _sample_sequences(MODELS[name][-1], [1, 3, 3, 17, 40])
    found = InferenceModel(engine).generate(prompts, 30, is_finished=NEVER)
    assert found == [_generate_greedily(peer, prompt, 30) for prompt in prompts]


def test_sequences_finish_independently(built):
    engine, _ = built()
    prompts = _sample_sequences(131, [5, 5, 9, 2, 30, 14, 8])
    model = InferenceModel(engine)
    complete = model.generate(prompts, 20, is_finished=NEVER)
    finished = model.generate(prompts, 20, is_finished=lambda tokens: tokens[-1] % 5 == 0)
    for tokens, all_tokens in zip(finished, complete, strict=True):
        ends = [i for i, token in enumerate(all_tokens) if token % 5 == 0]
        assert tokens == all_tokens[: ends[0] + 1 if ends else 20]
    assert len({len(tokens) for tokens in finished}) > 2


def test_samples_depend_on_seed_and_sample_id(built):
    engine, _ = built()
    prompts = [*_sample_sequences(131, [5, 9, 2, 30]), *_sample_sequences(131, [5] * 3, seed=3)] * 2
    settings = {"is_finished": NEVER, "temperature": 0.8, "top_p": 0.95}
    found = InferenceModel(engine).generate(prompts, 12, **settings)
    assert found == InferenceModel(engine, 60).generate(prompts, 12, **settings)
    assert found[7:] == InferenceModel(engine).generate(
        prompts[7:], 12, sample_ids=range(7, 14), **settings
    )
    assert [tokens[:5] for tokens in found] == InferenceModel(engine).generate(
        prompts, 5, **settings
    )
    assert all(one != other for one, other in zip(found[:7], found[7:], strict=True))
    assert found != InferenceModel(engine).generate(prompts, 12, seed=1, **settings)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (2.0, 0.3)])
def test_sampling_frequencies(built, temperature, top_p):
    """Sampled frequencies are within 5 sigma of the probabilities in double precision."""
    engine, peer = built()
    (prompt,) = _sample_sequences(131, [11])
    sampled = InferenceModel(engine).generate(
        [prompt] * 4000, 1, is_finished=NEVER, temperature=temperature, top_p=top_p
    )
    with torch.no_grad():
        logits = peer(torch.tensor([prompt])).logits[0, -1]
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    kept = probabilities.where(probabilities.cumsum(0) - probabilities < top_p, 0)
    expected = torch.zeros(131, dtype=torch.float64).scatter(0, order, kept / kept.sum())
    counts = torch.bincount(torch.tensor(sampled).flatten(), minlength=131)
    assert not counts[expected == 0].any()
    spread = (4000 * expected * (1 - expected)).sqrt()
    assert ((counts - 4000 * expected).abs() <= 5 * spread + 1).all()
    assert int((expected > 0).sum()) > 1


@pytest.mark.slow  # 9 s: imports and resets the compiler
@pytest.mark.filterwarnings("ignore")  # of torch
def test_inference_does_not_compile(configure, built, monkeypatch):
    """Sequences of many lengths run uncompiled, and later training steps do not recompile.

    The graphs are counted with the backend `eager`, which generates no code.
    """
    from torch._dynamo.utils import counters

    from hlat.data.packed_sequences import PackedSequences

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = configure("gqa", "compiler=inductor", "model.num_layers=1")
    engine = create_engine(config)
    engine.build(config)
    _, peer = built("gqa", "model.num_layers=1")
    requests = _requests(peer, 131)
    tokens = PackedSequences(np.arange(64, dtype=np.int32).reshape(2, 32))
    engine.train_step(tokens, 0.0)
    graphs = counters["stats"]["unique_graphs"]
    _assert_close(
        InferenceModel(engine).score(requests), [_expected(peer, *request) for request in requests]
    )
    engine.train_step(tokens, 0.0)
    engine.close()
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_a_stop_sequence_in_a_run_of_byte_tokens_is_found() -> None:
    """Find it although the decoder replaces a run of bytes that starts within a character."""

    class Tokenizer:
        end_token_ids = (256,)

        def decode(self, ids, skip_special_tokens):
            try:
                return bytes(ids).decode()
            except UnicodeDecodeError:
                return "\ufffd" * len(ids)

    is_finished = build_stop_check(Tokenizer(), ["\n"])
    for text in ("日本\n", "x日本語\n", "\n"):
        assert is_finished(list(text.encode()))
    assert not is_finished(list("日本".encode())[:-1])
    assert not is_finished(list("日本".encode()))
    assert is_finished([1, 256])
