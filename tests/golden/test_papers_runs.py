"""The presets against the paper and the released scripts, number by number (HLAT sections III and
V, tp_zero1_*.sh)."""

import pytest
from omegaconf import OmegaConf

PAPER = {
    "model=70b precision=mixed": {
        "model.num_layers": 80,
        "model.hidden_size": 8192,
        "model.intermediate_size": 28672,
        "model.num_attention_heads": 64,
        "model.num_key_value_heads": 8,
        "model.vocab_size": 32000,
        "model.init_std": 0.02,
        "parallelism.tp": 32,
        "parallelism.pp": 8,
        "parallelism.sequence_parallel": True,
        "parallelism.zero": 1,
        "parallelism.activation_checkpointing": "selective",
        "batch.global_batch_size": 1024,
        "batch.micro_batch_size": 1,
        "batch.sequence_length": 4096,
        "optimizer.lr": 1.5e-4,
        "precision.name": "mixed",
        "precision.master_weight_dtype": "fp32",
        "precision.grad_accum_dtype": "fp32",
        "checkpoint.every_steps": 300,
        "checkpoint.keep_last": 3,
    },
    "model=7b": {
        "model.num_layers": 32,
        "model.hidden_size": 4096,
        "model.intermediate_size": 11008,
        "model.num_attention_heads": 32,
        "model.num_key_value_heads": 32,
        "model.init_std": 0.021,
        "parallelism.tp": 8,
        "parallelism.pp": 1,
        "parallelism.sequence_parallel": True,
        "parallelism.zero": 0,
        "batch.global_batch_size": 1024,
        "batch.sequence_length": 4096,
        "optimizer.lr": 3e-4,
        "precision.name": "bf16_sr",
        "precision.rounding": "stochastic",
        "precision.optimizer_state_dtype": "bf16",
        "checkpoint.every_steps": 1000,
        "checkpoint.keep_last": 5,
    },
}
BOTH = {
    "run.seed": 12349,
    "model.rope_theta": 1e4,
    "model.rms_norm_eps": 1e-5,
    "model.tie_embeddings": False,
    "model.scaled_init": "depth",
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.grad_clip": 1.0,
    "schedule.name": "hlat",
    "schedule.warmup_steps": 2000,
    "schedule.total_steps": 500_000,
    "schedule.min_lr_ratio": 0.1,
}


@pytest.mark.parametrize("choice", PAPER)
def test_preset_equals_the_paper(compose, choice):
    config = compose(*choice.split())
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True, enum_to_str=True))
    for key, value in (BOTH | PAPER[choice]).items():
        assert OmegaConf.select(plain, key) == value, key


@pytest.mark.parametrize(
    ("experiment", "nodes", "dp"),
    [
        ("hlat_7b", 64, 256),
        ("hlat_70b", 256, 32),
        ("trn2_qwen3_8b", 1, 16),
        ("trn2_llama3_8b", 1, 16),
    ],
)
def test_experiments_fill_their_nodes(compose, experiment, nodes, dp):
    config = OmegaConf.to_object(compose(f"experiment={experiment}"))
    assert config.hardware.nodes == nodes
    assert config.num_processes == config.parallelism.tp * config.parallelism.pp * dp


def test_70b_upsamples_with_the_shares_of_table_3_after_1400_billion_tokens(compose):
    base, upsampled = OmegaConf.to_object(compose("experiment=hlat_70b")).phase.timeline
    assert base.tokens == 1.4e12
    assert upsampled.tokens == 400e9
    groups = {
        35.47: ("wikipedia", "c4"),
        41.27: ("stackexchange", "arxiv", "open_web_math", "pes2o"),
        23.26: ("github",),
    }
    total = sum(upsampled.weights.values())
    assert total == pytest.approx(253.7)
    for percentage, names in groups.items():
        assert round(100 * sum(upsampled.weights[name] for name in names) / total, 2) == percentage
    assert set(upsampled.weights) == {name for names in groups.values() for name in names}
