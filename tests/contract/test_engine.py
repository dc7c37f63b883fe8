"""Contract of engines, checked on each engine that this version executes."""

import dataclasses
import gc
import importlib.util
import itertools

import numpy as np
import pytest
import torch

from hlat.checkpoint import checkpoint_store
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences, compute_document_ids
from hlat.engine.engine_factory import create_engine
from hlat.model.decoder_spec import list_buffer_specs, list_parameter_specs

ENGINES = ["native"]
MODELS = {
    "dense": (),
    "experts": (
        *("model.mlp.kind=moe", "model.mlp.moe.num_experts=4", "model.mlp.moe.balance_loss=0.01"),
        *("model.mlp.moe.balance_scope=previous_step", "model.mlp.moe.bias_update_rate=0.001"),
        "model.mlp.moe.intermediate_size=48",
    ),
}
RATE = 1e-3
EOS = 7
MASKS = [(False, True), (True, False), (True, True)]


@pytest.fixture(params=itertools.product(ENGINES, MODELS), ids="-".join)
def config(request, compose, small):
    engine, model = request.param
    return resolve_config(
        compose(*small, "model.vocab_size=512", f"engine={engine}", *MODELS[model])
    )


@pytest.fixture
def build(config):
    """Build an engine, with some settings replaced: build(run={"seed": 1})."""

    def make(training=True, **groups):
        changed = {
            name: dataclasses.replace(getattr(config, name), **values)
            for name, values in groups.items()
        }
        engine = create_engine(config)
        engine.build(dataclasses.replace(config, **changed), training)
        return engine

    return make


@pytest.fixture
def tokens(config):
    generator = np.random.default_rng(0)
    size = (config.batch.global_batch_size, config.batch.sequence_length)
    batches = [generator.integers(0, config.model.vocab_size, size, np.int32) for _ in range(4)]
    return [PackedSequences(batch) for batch in batches]


@pytest.fixture
def packed(tokens):
    """Return sequences; micro batches of two contain 0, 8, 126 and 40 document boundaries."""
    rows = tokens[0].tokens.copy()
    rows[rows == EOS] += 1
    rows[2:4, 5:45:10] = EOS
    rows[4:6] = EOS
    rows[6:8, 1:41:2] = EOS
    return PackedSequences(rows, compute_document_ids(rows, EOS))


def _train(engine, batches):
    return [engine.read_metrics(engine.train_step(batch, RATE)) for batch in batches]


def _state(engine):
    return {shard.name: shard.tensor.detach().clone() for shard in engine.state_shards()}


def test_initial_loss_is_that_of_a_uniform_distribution(build, tokens, config):
    assert build().read_metrics(build().eval_step(tokens[0])).loss == pytest.approx(
        np.log(config.model.vocab_size), abs=0.1
    )


def test_the_same_seed_gives_the_same_bits(build, tokens):
    assert _train(build(), tokens) == _train(build(), tokens)


def test_another_seed_gives_another_model(build, tokens):
    assert _train(build(), tokens[:1]) != _train(build(run={"seed": 1}), tokens[:1])


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_accumulation_does_not_change_the_step(build, tokens, micro_batch_size):
    for one, other in zip(
        _train(build(), tokens),
        _train(build(batch={"micro_batch_size": micro_batch_size}), tokens),
        strict=True,
    ):
        *numbers, metrics = dataclasses.astuple(one)
        *expected_numbers, expected = dataclasses.astuple(other)
        assert numbers == pytest.approx(expected_numbers, rel=2e-6)
        entropies = [row.pop("router_entropy", 0.0) for row in (metrics, expected)]
        assert entropies[0] == pytest.approx(entropies[1], rel=1e-5)
        assert metrics == expected


def test_training_lowers_the_loss_of_its_batches(build, tokens):
    engine = build()
    losses = [metrics.loss for metrics in _train(engine, tokens[:1] * 5)]
    assert losses == sorted(losses, reverse=True)


def test_evaluation_changes_no_state_and_accepts_any_number_of_sequences(build, tokens):
    engine = build()
    before = _state(engine)
    whole = engine.read_metrics(engine.eval_step(tokens[0])).loss
    parts = [
        engine.read_metrics(engine.eval_step(PackedSequences(tokens[0].tokens[rows]))).loss
        for rows in (slice(0, 3), slice(3, 8))
    ]
    assert (3 * parts[0] + 5 * parts[1]) / 8 == pytest.approx(whole, rel=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in _state(engine).items())


def test_evaluation_ignores_masked_tokens(build, tokens):
    engine, rows = build(), tokens[0].tokens
    mask = np.arange(rows.shape[1]) < np.array([[9], [4], *[[0]] * (len(rows) - 2)])
    found = engine.read_metrics(engine.eval_step(PackedSequences(rows, target_mask=mask)))
    nine, four = (
        engine.read_metrics(engine.eval_step(PackedSequences(rows[i : i + 1, :n].copy()))).loss
        for i, n in enumerate((9, 4))
    )
    assert found.loss == pytest.approx((8 * nine + 3 * four) / 11, rel=1e-6)
    assert (found.token_losses > 0).tolist() == mask[:, 1:].tolist()
    assert found.token_losses[0].sum() == pytest.approx(8 * nine, rel=1e-6)


def test_evaluation_has_no_norms(build, tokens):
    engine = build()
    metrics = engine.read_metrics(engine.eval_step(tokens[0]))
    assert metrics.grad_norm is None
    assert metrics.param_norm is None


def test_rate_zero_changes_moments_but_no_weight(build, tokens):
    engine = build()
    before = _state(engine)
    engine.train_step(tokens[0], 0.0)
    for name, tensor in _state(engine).items():
        assert torch.equal(tensor, before[name]) == name.startswith("weights/"), name


def test_the_state_covers_every_canonical_parameter_and_moment_once(build, config):
    engine = build()
    names = [shard.name for shard in engine.state_shards()]
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(config.model)}
    buffers = {buffer.name: buffer.shape for buffer in list_buffer_specs(config.model)}
    assert sorted(names) == sorted(
        [
            *(f"{k}/{n}" for k in ("weights", "exp_avg", "exp_avg_sq", "updates") for n in shapes),
            *(f"buffers/{name}" for name in buffers),
        ]
    )
    shapes |= buffers
    for shard in engine.state_shards():
        if not shard.name.startswith("updates/"):
            assert shard.shape == shapes[shard.name.partition("/")[2]]


def test_resume_is_bit_identical(build, tokens, tmp_path):
    engine = build()
    _train(engine, tokens[:2])
    path = checkpoint_store.save_checkpoint(tmp_path, 2, engine.state_shards(), {})
    other = build(run={"seed": 99})
    checkpoint_store.load_checkpoint(path, other.state_shards())
    assert _train(other, tokens[2:]) == _train(engine, tokens[2:])


@pytest.mark.parametrize("decay_norms", [True, False])
def test_step_equals_plain_pytorch(build, tokens, config, decay_norms):
    """Compare one step with torch's clipping and AdamW on an independent copy of the model."""
    from hlat.model.decoder import Decoder

    engine = build(optimizer={"decay_norms": decay_norms, "weight_decay": 10.0})
    model = Decoder(config.model)
    with torch.no_grad():
        for copy, original in zip(
            model.parameters(), engine.model_parts[0].parameters(), strict=True
        ):
            copy.copy_(original)
    ours = engine.read_metrics(engine.train_step(tokens[0], RATE))
    batch = torch.from_numpy(tokens[0].tokens)
    norms, matrices = (
        [weight for weight in model.parameters() if (weight.dim() == 1) == vector]
        for vector in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": norms, "weight_decay": 10.0 if decay_norms else 0.0},
            {"params": matrices, "weight_decay": 10.0},
        ],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
        fused=False,
    )
    logits = model.compute_logits(batch)[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten().long())
    loss.backward()
    # torch's fp32 norm of a large tensor is off in the fifth digit; the reference is in fp64
    norm = torch.cat([weight.grad.double().flatten() for weight in model.parameters()]).norm()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert ours.loss == pytest.approx(loss.item(), rel=1e-6)
    assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for copy, original in zip(model.parameters(), engine.model_parts[0].parameters(), strict=True):
        # A first Adam step has size RATE for any gradient, so its error is measured against
        # RATE; the decay, 1% of a weight, is far above that error
        torch.testing.assert_close(copy, original, rtol=1e-6, atol=RATE * 2e-2)


@pytest.mark.parametrize("grad_clip", [0.0, 1e-3])
def test_gradients_are_clipped_to_grad_clip(build, tokens, grad_clip):
    """Compare with the first moment, a tenth of the clipped gradient; 0 clips nothing."""
    engine = build(optimizer={"grad_clip": grad_clip})
    norm = engine.read_metrics(engine.train_step(tokens[0], RATE)).grad_norm
    moments = [
        shard.tensor.double().flatten()
        for shard in engine.state_shards()
        if shard.name.startswith("exp_avg/")
    ]
    assert norm > 1e-3
    assert torch.cat(moments).norm().item() == pytest.approx(0.1 * (grad_clip or norm), rel=1e-4)


@pytest.mark.parametrize(("document_mask", "loss_mask"), [(False, False), *MASKS])
def test_document_and_loss_mask_are_independent(build, packed, document_mask, loss_mask):
    """Compare with torch's mean over labels."""
    engine = build(data={"document_mask": document_mask, "loss_mask": loss_mask})
    tokens, documents = torch.from_numpy(packed.tokens), torch.from_numpy(packed.document_ids)
    labels = tokens[:, 1:].long()
    if loss_mask:
        labels = labels.where(tokens[:, :-1] != EOS, -100)
    with torch.no_grad():
        documents = documents if document_mask else None
        logits = engine.model_parts[0].compute_logits(tokens, documents)[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert engine.read_metrics(engine.eval_step(packed)).loss == pytest.approx(
        expected.item(), rel=1e-6
    )
    assert engine.read_metrics(engine.train_step(packed, 0.0)).loss == pytest.approx(
        expected.item(), rel=1e-6
    )


@pytest.mark.parametrize(("document_mask", "loss_mask"), MASKS)
def test_accumulation_weights_all_counted_tokens_equally(build, packed, document_mask, loss_mask):
    """Compare the moments, which after one step are the gradients times 1 - beta1."""
    data = {"document_mask": document_mask, "loss_mask": loss_mask}
    whole, parts = (build(data=data, batch={"micro_batch_size": size}) for size in (8, 2))
    metrics = [engine.read_metrics(engine.train_step(packed, RATE)) for engine in (whole, parts)]
    assert metrics[0].loss == pytest.approx(metrics[1].loss, rel=2e-6)
    assert metrics[0].grad_norm == pytest.approx(metrics[1].grad_norm, rel=2e-6)
    found = _state(parts)
    for name, expected in _state(whole).items():
        if name.startswith("exp_avg/"):
            assert (found[name] - expected).norm() <= 2e-6 * expected.norm(), name


def test_a_batch_without_counted_tokens_has_loss_zero(build):
    engine = build(data={"document_mask": True, "loss_mask": True})
    rows = np.full((8, 64), EOS, np.int32)
    sequences = PackedSequences(rows, compute_document_ids(rows, EOS))
    metrics = engine.read_metrics(engine.train_step(sequences, RATE))
    assert (metrics.loss, metrics.grad_norm) == (0.0, 0.0)
    assert np.isfinite(metrics.param_norm)


def test_unused_documents_change_no_bit(build, packed):
    bare = PackedSequences(packed.tokens)
    assert _train(build(), [packed, packed]) == _train(build(), [bare, bare])


def test_a_mask_without_documents_fails_an_assertion(build, tokens):
    with pytest.raises(AssertionError):
        build(data={"loss_mask": True}).train_step(tokens[0], RATE)


def test_bf16_trains_under_both_masks(build, packed):
    from hlat.config.precision import Dtype

    kinds = (
        *("param_dtype", "compute_dtype", "grad_dtype", "grad_accum_dtype", "reduce_dtype"),
        "optimizer_state_dtype",
    )
    engine = build(
        precision=dict.fromkeys(kinds, Dtype.bf16),
        data={"document_mask": True, "loss_mask": True},
    )
    losses = [metrics.loss for metrics in _train(engine, [packed] * 4)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.slow  # 6 s per case
@pytest.mark.parametrize("recipe", ["fp32", "mixed", "bf16_sr"])
def test_close_frees_the_memory_of_an_engine(compose, small, config, tokens, recipe):
    def count_embeddings():
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        return sum(1 for tensor in tensors if tensor.shape == embeddings)

    embeddings = (config.model.vocab_size, config.model.hidden_size)
    config = resolve_config(
        compose(
            *small,
            "model.vocab_size=512",
            f"engine={config.engine.name.value}",
            f"precision={recipe}",
        )
    )
    before = count_embeddings()
    engine = create_engine(config)
    engine.build(config)
    engine.train_step(tokens[0], RATE)
    assert count_embeddings() > before
    engine.close()
    del engine
    assert count_embeddings() == before


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mixed", "bf16_sr"])
@pytest.mark.slow_after(2)
def test_an_engine_without_training_gives_the_same_results(
    compose, small, config, tokens, tmp_path, recipe
):
    """Load only the weights from a checkpoint of the full training state."""
    config = resolve_config(
        compose(
            *small,
            "model.vocab_size=512",
            f"engine={config.engine.name.value}",
            f"precision={recipe}",
        )
    )
    trained, reading = create_engine(config), create_engine(config)
    trained.build(config)
    _train(trained, tokens[:2])
    path = checkpoint_store.save_checkpoint(tmp_path, 2, trained.state_shards(), {})
    seed = dataclasses.replace(config.run, seed=99)
    reading.build(dataclasses.replace(config, run=seed), training=False)
    names = [shard.name for shard in reading.state_shards()]
    assert sorted(names) == sorted(
        f"weights/{each.name}" for each in list_parameter_specs(config.model)
    )
    checkpoint_store.load_checkpoint(path, reading.state_shards())
    assert _answers(reading, tokens[2]) == _answers(trained, tokens[2])


def _answers(engine, sequences):
    """Return the loss of sequences, and the log-probabilities after each token of one of them."""
    state = engine.create_decode_state().select(np.zeros(1, np.int64), sequences.tokens.shape[1])
    state.append(sequences.tokens[:1], np.array([sequences.tokens.shape[1]]))
    positions = np.arange(sequences.tokens.shape[1])
    found = state.compute_log_probs(
        np.zeros_like(positions), positions, np.full_like(positions, EOS)
    )
    return engine.read_metrics(engine.eval_step(sequences)), *(each.tolist() for each in found)


@pytest.mark.parametrize(
    ("recipe", "bytes_per_weight"),
    [pytest.param("fp32", 4, marks=pytest.mark.slow), ("mixed", 2)],
)
@pytest.mark.slow
def test_an_engine_without_training_allocates_only_weights(
    compose, small, config, recipe, bytes_per_weight
):
    def storages():
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        found = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
        return {each._cdata: each for each in found}

    config = resolve_config(
        compose(
            *small,
            "model.vocab_size=512",
            f"engine={config.engine.name.value}",
            f"precision={recipe}",
        )
    )
    num_weights = sum(int(np.prod(each.shape)) for each in list_parameter_specs(config.model))
    before = storages()
    engine = create_engine(config)
    engine.build(config, training=False)
    found = sum(each.nbytes() for key, each in storages().items() if key not in before)
    assert 0 <= found - bytes_per_weight * num_weights < 1024
    engine.close()


def test_train_step_requires_training(build, tokens):
    with pytest.raises(AssertionError, match="training=False"):
        build(training=False).train_step(tokens[0], RATE)


def test_a_missing_device_is_rejected_by_name(build):
    with pytest.raises(
        ConfigError, match=r"engine\.device=neuron is not on this machine; use auto or cpu"
    ):
        build(engine={"device": "neuron"})


def test_an_engine_without_its_libraries_is_rejected_by_name(compose, small):
    if importlib.util.find_spec("neuronx_distributed"):
        pytest.skip("neuronx_distributed is here")
    with pytest.raises(ConfigError, match=r"engine\.name=nxd needs .*neuronx_distributed"):
        create_engine(resolve_config(compose(*small, "engine=nxd")))
