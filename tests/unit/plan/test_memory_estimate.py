"""Memory terms against manual examples, and errors that contain the terms."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.plan.feasibility import validate_feasibility, validate_vocab_size
from hlat.plan.memory_estimate import estimate_memory, get_device_memory_bytes


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def test_7b_in_bf16_requires_8_bytes_per_parameter_over_8_ranks(config):
    memory = estimate_memory(config("experiment=hlat_7b"))
    # 6,738,415,616 x 8 / 8, and the norms, which are replicated: 65 x 4096 x 7/8 x 8
    stored = memory.weights + memory.accumulation + memory.optimizer_state
    assert stored == 6_738_415_616 + 65 * 4096 * 7
    assert memory.gradients == memory.master_weights == 0


def test_70b_shards_its_optimizer_over_dp(config):
    memory = estimate_memory(config("experiment=hlat_70b"))
    layer = 8192 * (2 * 8192 + 3 * 28672) / 32 + 2 * 128 * 8192 + 2 * 8192  # one kv head per rank
    first_stage = 10 * layer + 32000 * 8192 / 32
    assert memory.weights == pytest.approx(2 * (first_stage + 8192), abs=2 * 8192)
    assert memory.gradients == memory.weights  # NxD stores gradients and their sums
    assert memory.accumulation == 2 * memory.weights
    assert memory.master_weights == pytest.approx(memory.weights / 2 * 4 / 32)
    assert memory.optimizer_state == 2 * memory.master_weights


def test_activations_of_70b_in_the_layout_of_the_paper(config):
    memory = estimate_memory(config("experiment=hlat_70b"))
    # Norm and matrix inputs 4 h, o_proj's input and q twice 3 h, gate, up and down_proj's input
    # 3 I, over 32 ranks; k twice and v of one head of 128
    token = (7 * 8192 + 3 * 28672) / 32 + 3 * 128
    assert memory.activations == 8 * 10 * 4096 * token * 2
    # Outputs of 8 passes in flight, an input received in advance, and two gradients
    assert memory.collectives == 2 * 4096 * 8192 * 2 + 2 * 130e6 + (8 + 3) * 4096 * 8192 * 2 / 32
    assert memory.reserve == 3 * 2**30


@pytest.mark.parametrize(
    ("overrides", "num_saved"),
    [
        # h 128, I 352, one of four kv heads of 32; replicated and sharded terms
        (("parallelism.tp=2", "parallelism.dp=1"), 4 * 128 + (3 * 128 + 3 * 352) / 2 + 3 * 32),
        (
            (
                "parallelism.tp=2",
                "parallelism.dp=1",
                "parallelism.sequence_parallel=true",
            ),
            3 * 128 + (3 * 128 + 3 * 352) / 2 + 3 * 32,
        ),
    ],
)
def test_sequence_parallelism_shards_the_inputs_of_norms(config, overrides, num_saved):
    run = config(*overrides)
    assert estimate_memory(run).activations == 8 * 256 * 4 * num_saved * 4


def test_working_memory_of_a_layer_beyond_the_logits(config):
    few = ("model.vocab_size=4096", "batch.sequence_length=256", "model.intermediate_size=4096")
    memory = estimate_memory(config(*few))
    assert memory.logits == (512 * 4096 + 4096 * 128) * 4  # in chunks of 512 positions
    assert memory.working == 8 * 256 * 7 * 4096 * 4 - memory.logits


def test_unfused_attention_stores_its_probabilities(config):
    overrides = ("experiment=hlat_70b", "hardware.nodes=8")
    memory = estimate_memory(config(*overrides))  # the first stage, which has no head
    scores = 2 * 4096 * (2 + 2 * 4)  # of two heads: in bf16, and twice in the softmax's fp32
    assert memory.working == 4096 * (7 * 28672 / 32 * 2 + scores)
    activations = estimate_memory(
        config(*overrides, "parallelism.activation_checkpointing=none")
    ).activations
    more = 8 * 10 * 4096 * 2 * 4096 * 2
    assert activations == memory.activations + more


def test_several_stages_per_rank_store_more_activations(config):
    overrides = ("parallelism.pp=4", "batch.micro_batch_size=1", "model.num_layers=8")
    one = estimate_memory(config(*overrides))
    several = estimate_memory(
        config(
            *overrides,
            "parallelism.pipeline_schedule=interleaved",
            "parallelism.stages_per_rank=2",
        )
    )
    assert several.activations == one.activations * (4 + 3 / 2) / 4


def test_activations_and_logits_of_the_tiny_model(config):
    memory = estimate_memory(config())
    tokens = config().micro_batch_size * config().batch.sequence_length
    assert memory.activations == tokens * 4 * (7 * 128 + 3 * 64 + 3 * 352) * 4
    assert memory.logits == (512 + 128) * 4096 * 4  # and the gradient of the head


def test_asynchronous_saves_copy_the_state_on_a_cpu(config):
    num_parameters = (
        4096 * 128 * 2 + 4 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 352 + 2 * 128) + 128
    )
    assert estimate_memory(config()).saving == num_parameters * 12
    assert estimate_memory(config("precision=bf16")).saving == num_parameters * 6
    assert estimate_memory(config("checkpoint.asynchronous=false")).saving == 0
    assert estimate_memory(config("experiment=hlat_7b")).saving == 0


def test_document_positions_and_masks_are_stored_once(config):
    num_tokens = config().micro_batch_size * config().batch.sequence_length
    rotation = num_tokens * 2 * 32 * 4  # cosines and sines of a head
    masked = estimate_memory(config("data.document_mask=true"))
    shared = masked.activations - estimate_memory(config()).activations
    assert shared == num_tokens * 8 + rotation  # int64 position of the first token
    trn2 = ("hardware=trn2_48xl", "hardware.processes_per_node=1")
    masked = estimate_memory(config(*trn2, "data.document_mask=true"))
    shared = masked.activations - estimate_memory(config(*trn2)).activations
    repeated = 4 * num_tokens * 2 * 128 * 4  # key and value of each query head, in 4 layers
    assert shared == num_tokens * 256 * 4 + rotation + repeated


def test_first_pipeline_stage_stores_pp_micro_batches(config):
    overrides = ("experiment=hlat_70b", "hardware.nodes=8")
    full = estimate_memory(config(*overrides))
    single = estimate_memory(config(*overrides, "batch.global_batch_size=1"))
    assert full.activations == 8 * single.activations


def test_device_memory_of_hardware_and_machine(config):
    assert get_device_memory_bytes(config("hardware=trn1_32xl")) == 16 * 2**30
    assert get_device_memory_bytes(config()) > 2**30
    shared = get_device_memory_bytes(config("parallelism.tp=2", "parallelism.pp=2"))
    assert shared == get_device_memory_bytes(config()) / 4


def test_model_that_does_not_fit_is_rejected_with_all_terms(config):
    run = config("model=70b", "parallelism=single", "precision=fp32", "hardware.memory_gib=24")
    with pytest.raises(ConfigError) as caught:
        validate_feasibility(run)
    message = str(caught.value)
    assert message.startswith("model=70b needs 1,")
    assert "hardware=cpu has 24.0" in message
    for term in (
        "weights 257.0",
        "accumulation 257.0",
        "optimizer_state 513.9",
        "activations",
        "logits",
    ):
        assert term in message
    assert "run.force=true skips this" in message
    validate_feasibility(dataclasses.replace(run, run=dataclasses.replace(run.run, force=True)))


def test_model_that_fits_is_accepted(config):
    run = config()
    assert estimate_memory(run).total < get_device_memory_bytes(run)
    validate_feasibility(run)


def test_removed_variables_are_rejected_with_their_replacement(config):
    run = config("compiler=neuron_2_31", "+compiler.environment.XLA_USE_BF16='1'")
    with pytest.raises(
        ConfigError, match=r"compiler\.environment\.XLA_USE_BF16 was removed .* precision=bf16_sr"
    ):
        validate_feasibility(run)


@pytest.mark.parametrize(
    "preset", ["none", "neuron_2_20", "neuron_2_28", "neuron_2_31", "neuron_2_33"]
)
def test_presets_contain_no_removed_variables(config, preset):
    run = config(f"compiler={preset}")
    assert not {"XLA_USE_BF16", "XLA_DOWNCAST_BF16"} & {*run.compiler.environment}
    validate_feasibility(run)


def test_vocabulary_smaller_than_the_tokenizer_is_rejected(config):
    model = dataclasses.replace(config().model, vocab_size=100)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100 is smaller than the 4096 ids"):
        validate_vocab_size(model, 4096)
    validate_vocab_size(model, 100)


def test_initial_weights_are_required_unless_a_checkpoint_exists(compose, tmp_path):
    run = resolve_config(compose("model.init_from=nowhere", f"run.root={tmp_path}", "run.name=x"))
    with pytest.raises(ConfigError) as caught:
        validate_feasibility(run)
    assert str(caught.value) == (
        "model.init_from=nowhere: there is no such directory; specify a directory with config.json and "
        "*.safetensors"
    )
    (tmp_path / "x/checkpoints/step_00000005").mkdir(parents=True)
    validate_feasibility(run)


def test_zero_stages_shard_one_term_each(config):
    def terms(stage, recipe, *more):
        overrides = (f"parallelism.zero={stage}", "parallelism.dp=4", f"precision={recipe}")
        memory = estimate_memory(config(*overrides, *more))
        optimizer = memory.master_weights + memory.optimizer_state
        return memory.weights, memory.accumulation, optimizer

    count = terms(0, "fp32")[0] / 4
    assert terms(0, "mixed") == (2 * count, 4 * count, 12 * count)
    assert terms(1, "mixed") == (2 * count, 4 * count, 3 * count)
    assert terms(2, "mixed") == (2 * count, count, 3 * count)
    assert terms(2, "fp32") == (5 * count, count, 2 * count)  # owned rows and gathered weights
    layer = 128 * (2 * 128 + 2 * 64 + 3 * 352 + 2)
    assert terms(3, "fp32") == (5 * count - 2 * 4 * layer, count, 2 * count)
    replicas = "parallelism.dp_replicate=2"
    assert terms(1, "mixed", replicas) == (2 * count, 4 * count, 6 * count)
    gathered = 4 * count - 2 * 4 * layer
    assert terms(3, "fp32", replicas) == (2 * count + gathered, 2 * count, 4 * count)


@pytest.mark.parametrize("experiment", ["trn2_qwen3_8b", "trn2_llama3_8b"])
def test_experiments_of_trn2_fit_a_logical_core(config, experiment):
    run = config(f"experiment={experiment}")
    assert run.num_processes == 64
    assert estimate_memory(run).total < get_device_memory_bytes(run) == 24 * 2**30
