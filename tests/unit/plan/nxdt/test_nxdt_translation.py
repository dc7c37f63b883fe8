"""Translation of NeuronX Distributed Training configurations: all keys are listed."""

import copy
import os
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config import compose as composition
from hlat.config.compose import load_model_presets
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.untrusted_files import load_untrusted_yaml
from hlat.plan.nxdt import nxdt_translation as nxdt
from hlat.plan.nxdt.nxdt_config import UnresolvedValue, parse_nxdt_config
from hlat.plan.nxdt.nxdt_translation import format_translation
from hlat.plan.nxdt.translation_rules import RULES, load_key_tables

REPOSITORY = Path(__file__).resolve().parents[4]
NXDT_SOURCE = Path(os.environ.get("NXDT_SOURCE", "/nowhere"))
PUBLISHED = sorted((NXDT_SOURCE / "examples/conf").glob("*.yaml"))
KEPT = "exp_manager.checkpoint_callback_params."
VARIABLE = "++compiler.environment."

PRESETS = load_model_presets()

LLAMA_2_7B = {
    "model_source": "megatron",
    "name": "llama_7b",
    "seed": 7,
    "trainer": {"devices": 32, "num_nodes": 4, "max_steps": 1000, "gradient_clip_val": 1.0},
    "distributed_strategy": {
        "tensor_model_parallel_size": 8,
        "sequence_parallel": True,
        "zero1": True,
    },
    "data": {
        "micro_batch_size": 1,
        "global_batch_size": 256,
        "seq_length": "${model.encoder_seq_length}",
        "data_prefix": [1.0, "/text/book"],
    },
    "model": {
        "encoder_seq_length": 4096,
        "max_position_embeddings": "${.encoder_seq_length}",
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "init_method_std": 0.021,
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "has_bias": False,
        "hidden_dropout": 0,
        "share_embeddings_and_output_weights": False,
        "optim": {
            "name": "adamw",
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "sched": {"name": "CosineAnnealing", "warmup_steps": 100, "min_lr": 3e-5},
        },
    },
    "precision": {"type": "mixed_precision"},
}
LLAMA_3_8B = {
    "model_source": "hf",
    "name": "hf_llama",
    "trainer": {"devices": 64, "num_nodes": 1, "max_steps": 500},
    "distributed_strategy": {"tensor_model_parallel_size": 8},
    "data": {"micro_batch_size": 1, "global_batch_size": 64, "train_dir": "/tokens"},
    "model": {
        "model_config": "/away/config.json",
        "encoder_seq_length": 8192,
        "num_layers": 32,
        "hidden_size": -1,
        "fusions": {"softmax": True, "flash_attention": True},
        "optim": {"name": "adamw_fp32OptState", "lr": 1e-4, "weight_decay": 0.1},
    },
    "precision": {"type": "mixed_precision"},
}
LLAMA_3_8B_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 16,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}


def copy_with(tree, **values):
    """Return a copy with other values by full key, with two underscores for a dot."""
    tree = copy.deepcopy(tree)
    for name, value in values.items():
        *path, last = name.split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def translate(tree, config=None):
    return nxdt.translate_nxdt_config(parse_nxdt_config(tree, config), PRESETS)


def get_reasons(listed):
    return {line.key: line.reason for line in listed}


def resolve_translation(translation):
    return resolve_config(
        composition.compose_config(
            nxdt.format_overrides(translation.overrides, translation.unset, nxdt.PLACEHOLDERS)
        )
    )


def test_preset_of_the_same_shape_is_selected():
    translation = translate(LLAMA_2_7B)
    assert translation.overrides["model"] == "7b"
    assert not [key for key in translation.overrides if key.startswith("model.")]
    assert get_reasons(translation.mapped)["model.vocab_size"].startswith("the preset's; ")
    config = resolve_translation(translation)
    assert config.model.name == "7b"
    assert config.model.init_std == 0.021
    assert config.schedule.total_steps == 1000
    assert config.optimizer.decay_norms is False
    assert config.precision.name == "mixed"
    assert config.parallelism.zero == 1
    assert config.hardware.nodes == 4
    assert config.run.log_every == 50  # Lightning's
    assert config.phase.name == "base"


def test_differences_from_the_preset_are_overrides():
    translation = translate(copy_with(LLAMA_2_7B, model__init_method_std=0.01))
    assert translation.overrides["model"] == "7b"
    assert translation.overrides["model.init_std"] == 0.01


def test_other_shapes_are_specified_completely():
    translation = translate(copy_with(LLAMA_2_7B, model__num_layers=30))
    assert "model" not in translation.overrides
    assert translation.overrides["model.name"] == "llama_7b"
    assert translation.unset["model.vocab_size"] == "at least the tokenizer's size"
    assert resolve_translation(translation).model.num_key_value_heads == 32


def test_hf_model_has_the_sizes_of_its_config():
    translation = translate(LLAMA_3_8B, LLAMA_3_8B_CONFIG)
    config = resolve_translation(translation)
    assert config.model.num_layers == 32  # the YAML has precedence
    assert config.model.hidden_size == 4096  # -1 does not
    assert config.model.vocab_size == 128256
    assert config.model.scaled_init.value == "none"
    assert config.hardware.name == "trn2.48xlarge"
    assert get_reasons(translation.redundant)["model.model_config"] == "read"
    assert set(translation.unset) == {
        "data.sources.files.paths",
        "data.tokenizer",
        "data.eos_token",
    }


def test_sizes_are_unset_without_the_config_of_the_model():
    translation = translate(LLAMA_3_8B)
    assert translation.unset["model.vocab_size"] == "in the config.json of model.model_config"
    assert "model.num_layers" not in translation.unset
    assert "beside the YAML" in get_reasons(translation.unsupported)["model.model_config"]


CASES = [
    ({"name": "x", "model__num_layers": 3}, {"model.name": "x", "model.num_layers": 3}),
    ({"seed": 5}, {"run.seed": 5}),
    ({"trainer__devices": 32}, {"hardware": "trn1_32xl"}),
    ({"trainer__devices": 64}, {"hardware": "trn2_48xl"}),
    ({"trainer__devices": 2}, {"hardware": "trn1_32xl", "hardware.processes_per_node": 2}),
    ({"trainer__devices": 128}, {"hardware": "trn2_48xl", "hardware.processes_per_node": 128}),
    ({"trainer__num_nodes": 3}, {"hardware.nodes": 3}),
    ({"trainer__max_steps": 9}, {"schedule.total_steps": 9}),
    ({"trainer__log_every_n_steps": 3}, {"run.log_every": 3}),
    ({"trainer__gradient_clip_val": 0.5}, {"optimizer.grad_clip": 0.5}),
    ({"trainer__gradient_clip_val": None}, {"optimizer.grad_clip": 0}),
    ({"trainer__val_check_interval": 500, "trainer__limit_val_batches": 2}, {"evaluation.every_steps": 500, "evaluation.sequences_per_source": 512}),
    ({"trainer__val_check_interval": 500, "trainer__limit_val_batches": 0}, {"evaluation.every_steps": None}),
    ({"trainer__val_check_interval": 1001, "trainer__limit_val_batches": 1}, {"evaluation.every_steps": None}),
    ({"exp_manager__name": "a"}, {"run.name": "a"}),
    ({"exp_manager__exp_dir": "/d"}, {"run.root": "/d"}),
    ({"exp_manager__explicit_log_dir": "/d/e", "exp_manager__exp_dir": "/f", "exp_manager__name": "g"}, {"run.root": "/d", "run.name": "e"}),
    ({"exp_manager__async_checkpointing": True}, {"checkpoint.asynchronous": True}),
    ({"exp_manager__checkpoint_callback_params__every_n_train_steps": 20}, {"checkpoint.every_steps": 20}),
    ({"exp_manager__checkpoint_callback_params__save_top_k": 2}, {"checkpoint.keep_last": 2, "checkpoint.keep_every_steps": None}),
    ({"exp_manager__checkpoint_callback_params": {"save_top_k": -1, "every_n_train_steps": 20}}, {"checkpoint.keep_last": 1, "checkpoint.keep_every_steps": 20}),
    ({"distributed_strategy__tensor_model_parallel_size": 4}, {"parallelism.tp": 4}),
    ({"distributed_strategy__pipeline_model_parallel_size": 2}, {"parallelism.pp": 2}),
    ({"distributed_strategy__virtual_pipeline_model_parallel_size": 2}, {"parallelism.stages_per_rank": 2, "parallelism.pipeline_schedule": "interleaved"}),
    ({"distributed_strategy__virtual_pipeline_model_parallel_size": None}, {"parallelism.stages_per_rank": 1, "parallelism.pipeline_schedule": "one_f_one_b"}),
    ({"distributed_strategy__zero1": False}, {"parallelism.zero": 0}),
    ({"distributed_strategy__sequence_parallel": True}, {"parallelism.sequence_parallel": True}),
    ({"distributed_strategy__tensor_model_parallel_size": 1}, {"parallelism.sequence_parallel": False}),
    ({"data__micro_batch_size": 2}, {"batch.micro_batch_size": 2}),
    ({"data__global_batch_size": 8}, {"batch.global_batch_size": 8}),
    ({"model__encoder_seq_length": 128}, {"batch.sequence_length": 128}),
    ({"model__encoder_seq_length": None, "data__seq_length": 64}, {"batch.sequence_length": 64}),
    ({"data__eod_mask_loss": True}, {"data.loss_mask": True}),
    ({"data__tokenizer__type": "/t/llama/"}, {"data.tokenizer": "/t/llama/tokenizer.json"}),
    ({"model__hidden_size": 64, "model__ffn_hidden_size": 96, "model__num_attention_heads": 4, "model__num_kv_heads": 2}, {"model.hidden_size": 64, "model.intermediate_size": 96, "model.num_attention_heads": 4, "model.num_key_value_heads": 2}),
    ({"model__position_freq_base": 5e5}, {"model.rope_theta": 5e5}),
    ({"model__layernorm_epsilon": 1e-6}, {"model.rms_norm_eps": 1e-6}),
    ({"model__share_embeddings_and_output_weights": True}, {"model.tie_embeddings": True}),
    ({"model__init_method_std": 0.01}, {"model.init_std": 0.01}),
    ({"model__use_scaled_init_method": False}, {"model.scaled_init": "none"}),
    ({"model__activations_checkpoint_granularity": "full"}, {"parallelism.activation_checkpointing": "full"}),
    ({"model__activations_checkpoint_granularity": "selective", "model__activations_checkpoint_recompute": ["CoreAttention"]}, {"parallelism.activation_checkpointing": "selective"}),
    ({"model__activations_checkpoint_granularity": "selective", "model__activations_checkpoint_recompute": []}, {"parallelism.activation_checkpointing": "none"}),
    ({"model__activations_checkpoint_granularity": None}, {"parallelism.activation_checkpointing": "none"}),
    ({"model__do_layer_norm_weight_decay": True}, {"optimizer.decay_norms": True}),
    ({"model__fusions__softmax": True}, {f"{VARIABLE}NEURON_FUSE_SOFTMAX": 1}),
    ({"model__optim__name": "adamw_fp32OptState"}, {"optimizer.name": "adamw"}),
    ({"model__optim__lr": 1e-5}, {"optimizer.lr": 1e-5}),
    ({"model__optim__betas": [0.8, 0.9]}, {"optimizer.beta1": 0.8, "optimizer.beta2": 0.9}),
    ({"model__optim__eps": 1e-6}, {"optimizer.eps": 1e-6}),
    ({"model__optim__weight_decay": 0.2}, {"optimizer.weight_decay": 0.2}),
    ({}, {"schedule.name": "cosine", "schedule.warmup_steps": 100, "schedule.min_lr_ratio": 0.1, "schedule.decay_steps": None}),
    ({"model__optim__sched__name": "LinearAnnealingWithWarmUp"}, {"schedule.name": "linear", "schedule.warmup_steps": 100, "schedule.min_lr_ratio": 0}),
    ({"model__optim__sched": {}}, {"schedule.name": "constant", "schedule.warmup_steps": 0, "schedule.min_lr_ratio": None}),
    ({"compiler_flags": "--a -O1 --b=c"}, {"compiler.cc_flags": ["--a", "-O1", "--b=c", "--enable-mixed-precision-accumulation"]}),
    ({"compiler_cache_url": "/cache"}, {f"{VARIABLE}NEURON_COMPILE_CACHE_URL": "/cache"}),
    ({"aync_exec_max_inflight_requests": 7}, {f"{VARIABLE}NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": 7}),
    ({"bucket_size_collectives": 64}, {f"{VARIABLE}ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": 64}),
    ({"neuron_rt_exec_timeout": 100}, {f"{VARIABLE}NEURON_RT_EXEC_TIMEOUT": 100}),
    ({"neuron_experimental_compress_rg": False}, {f"{VARIABLE}NEURON_EXPERIMENTAL_COMPRESS_RG": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("values", "overrides"), CASES, ids=lambda part: "-".join(part)[:60])
def test_keys_are_translated_to_overrides(values, overrides):
    result = translate(copy_with(LLAMA_2_7B, **values)).overrides
    defaults = PRESETS["7b"] if result.get("model") == "7b" else {}
    for key, value in overrides.items():
        assert result.get(key, defaults.get(key.removeprefix("model."))) == value


def test_overrides_of_all_cases_compose():
    overrides = {}
    for values, _ in CASES:
        overrides |= translate(copy_with(LLAMA_2_7B, **values)).overrides
    unset = dict.fromkeys(nxdt.PLACEHOLDERS, "")
    assert OmegaConf.to_object(
        composition.compose_config(nxdt.format_overrides(overrides, unset, nxdt.PLACEHOLDERS))
    )


@pytest.mark.parametrize("tree", [LLAMA_2_7B, LLAMA_3_8B], ids=["megatron", "hf"])
def test_run_without_a_schedule_has_a_constant_learning_rate(tree):
    tree = copy.deepcopy(tree)
    tree["model"]["optim"].pop("sched", None)
    config = resolve_translation(translate(tree, LLAMA_3_8B_CONFIG))
    assert config.schedule.name == "constant"


def test_fused_softmax_variable_is_removed_if_disabled():
    args = nxdt.format_overrides(translate(LLAMA_2_7B).overrides)
    assert "~compiler.environment.NEURON_FUSE_SOFTMAX" in args
    environment = resolve_translation(translate(LLAMA_2_7B)).compiler.environment
    assert "NEURON_FUSE_SOFTMAX" not in environment


MIXED = {"precision": "mixed"}
DOUBLES = {"precision.fp32_operators": ["norm", "softmax", "logits", "loss"]}


@pytest.mark.parametrize(
    ("settings", "recipe"),
    [
        ({"type": "fp32"}, {"precision": "fp32"}),
        ({"type": "bf16SR"}, {"precision": "bf16_sr"}),
        ({"type": "mixed_precision"}, MIXED),
        ({"type": "autocast"}, MIXED),
        ({"type": "mixed_precisionSR"}, MIXED | {"precision.rounding": "stochastic"}),
        ({"type": "mixed_precision_SR"}, MIXED | {"precision.rounding": "stochastic"}),
        ({"type": "manual", "xla_use_bf16": "1"}, {"precision": "bf16"}),
        (
            {"type": "manual", "xla_use_bf16": 1, "neuron_rt_stochastic_rounding_en": "1"},
            {"precision": "bf16_sr"},
        ),
        ({"type": "manual"}, {"precision": "fp32"}),
        (
            {"type": "manual", "xla_downcast_bf16": "1", "master_weights": True},
            MIXED | {"precision.grad_accum_dtype": "bf16", "precision.reduce_dtype": "bf16"},
        ),
        (
            {
                "type": "manual",
                "xla_downcast_bf16": "1",
                "master_weights": True,
                "fp32_grad_acc": True,
            },
            MIXED,
        ),
        ({"type": "manual", "xla_downcast_bf16": "1"}, {"precision": "bf16"} | DOUBLES),
        (
            {"type": "manual", "xla_downcast_bf16": "1", "fp32_grad_acc": True},
            {
                "precision": "bf16",
                "precision.grad_accum_dtype": "fp32",
                "precision.reduce_dtype": "fp32",
            }
            | DOUBLES,
        ),
    ],
    ids=lambda part: "-".join(map(str, part.values())),
)
def test_precision_equals_that_of_the_nxdt_code(settings, recipe):
    translation = translate(copy_with(LLAMA_2_7B, precision=settings))
    result = {k: v for k, v in translation.overrides.items() if k.startswith("precision")}
    assert result == recipe
    assert resolve_config(composition.compose_config(nxdt.format_overrides(recipe)))


def test_master_weights_require_zero1():
    translation = translate(copy_with(LLAMA_2_7B, distributed_strategy__zero1=False))
    assert translation.overrides["precision"] == "bf16"


def test_manual_without_variables_casts_hf_models():
    tree = copy_with(LLAMA_3_8B, precision={"type": "manual", "master_weights": True})
    assert translate(tree).overrides["precision"] == "mixed"


def test_unknown_precision_type_has_no_equivalent():
    translation = translate(copy_with(LLAMA_2_7B, precision__type="fp8"))
    assert get_reasons(translation.unsupported)["precision.type"] == "unknown to NxDT"


@pytest.mark.parametrize(
    ("spelling", "note"),
    [("mixed_precisionSR", "NxDT refuses"), ("mixed_precision_SR", "no master weights there")],
)
def test_both_spellings_of_stochastic_rounding_have_a_note(spelling, note):
    translation = translate(copy_with(LLAMA_2_7B, precision__type=spelling))
    assert note in get_reasons(translation.mapped)["precision.type"]


def test_weight_decay_of_hf_models_equals_that_of_the_nxdt_code():
    translation = translate(copy_with(LLAMA_3_8B, model__do_layer_norm_weight_decay=True))
    assert translation.overrides["optimizer.weight_decay"] == 0.01
    assert translation.overrides["optimizer.decay_norms"] is False
    assert "always uses 0.01" in get_reasons(translation.mapped)["model.optim.weight_decay"]


UNSUPPORTED = [
    ("trainer__gradient_clip_val", 0, "0 would scale"),
    ("trainer__max_epochs", 3, "runs end by steps"),
    ("trainer__lnc", 2, "check hardware.memory_gib"),
    ("trainer__val_check_interval", 0.5, "a fraction of an epoch"),
    ("trainer__limit_val_batches", 1.0, "a fraction of the validation set"),
    ("trainer__accumulate_grad_batches", 2, "no equivalent"),
    ("exp_manager__resume_if_exists", False, "another run.name"),
    ("exp_manager__resume_from_checkpoint", "/c", "then model.init_from; see docs/migration.md"),
    ("exp_manager__create_checkpoint_callback", False, "always saved"),
    ("exp_manager__checkpoint_callback_params__save_top_k", 0, "always saved"),
    ("exp_manager__checkpoint_callback_params__monitor", "val_loss", "the newest are kept"),
    ("data__seq_length", 64, "differs from model.encoder_seq_length=4096"),
    ("data__reset_position_ids", True, "together with data.document_mask"),
    ("data__reset_attention_mask", True, "data.document_mask=true"),
    ("data__tokenizer__type", "GPT2BPETokenizer", "set data.tokenizer to a tokenizer.json"),
    ("data__data_prefix", ["/x"], "set data.sources"),
    ("model__sliding_window_size", 128, "attention covers the full sequence"),
    ("model__hidden_dropout", 0.1, "no dropout"),
    ("model__pipeline_cuts", ["model.layers.1"], "stages are cut evenly"),
    ("model__optim__name", "sgd", "hlat supports only AdamW"),
    ("model__optim__lr", {}, "not a usable value"),
    ("model__optim__betas", [0.9], "not a usable value"),
    ("model__optim__sched__name", "NoamAnnealing", "hlat has cosine"),
    ("model__optim__sched__min_lr", "low", ""),
    ("model__optim__sched__constant_steps", 10, "with the last step"),
    ("precision__parallel_layers_reduce_dtype", "fp32", "in precision.compute_dtype"),
    ("compiler_cache_url", "a\x1b[2Jb", "not a usable value"),
    ("my_own_key", 1, "no equivalent"),
    ("seed", "???", "the value is unknown"),
    ("seed", "${oc.env:HOME}", "the value is unknown"),
    ("seed", "${multiply:2,3}", "the value is unknown"),
    ("seed", "${seed}", "the value is unknown"),
    ("seed", "${model}", "the value is unknown"),
    ("seed", "${......a}", "the value is unknown"),
    ("compiler_cache_url", "/x/${name}", "the value is unknown"),
]


@pytest.mark.parametrize(("key", "value", "reason"), UNSUPPORTED, ids=lambda part: str(part)[:40])
def test_settings_without_equivalent_have_a_reason(key, value, reason):
    translation = translate(copy_with(LLAMA_2_7B, **{key: value}))
    name = key.replace("__", ".")
    result = get_reasons([*translation.unsupported, *translation.redundant])
    assert reason in result[name]
    assert name not in get_reasons(translation.mapped)


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ({"model__moe__num_experts": 8}, "mixture of experts"),
        ({"model_alignment_strategy__peft__lora_rank": 8}, "LoRA"),
        ({"model_alignment_strategy__dpo__kl_beta": 0.1}, "DPO"),
        ({"model_alignment_strategy__orpo__beta": 0.1}, "ORPO"),
        ({"model_alignment_strategy__sft__packing": True}, "supervised fine-tuning"),
        ({"distributed_strategy__context_parallel_size": 2}, "context parallelism"),
        ({"model__normalization": "layernorm"}, "a decoder that is not Llama's"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_missing_feature_is_in_the_first_line(values, feature):
    translation = translate(copy_with(LLAMA_2_7B, **values))
    assert translation.missing_features == [feature]
    assert format_translation("x.yaml", translation, ())[0].startswith(
        f"x.yaml uses {feature}, which"
    )


def test_several_missing_features_are_listed():
    tree = copy_with(LLAMA_3_8B, name="hf_mixtral", model_alignment_strategy={"peft": 1, "sft": 1})
    line = format_translation("x.yaml", translate(tree), ())[0]
    assert "mixture of experts, LoRA and supervised fine-tuning, which hlat" in line


def test_disabled_features_are_not_missing():
    tree = copy_with(
        LLAMA_2_7B,
        distributed_strategy__context_parallel_size=1,
        distributed_strategy__expert_model_parallel_size=1,
        model_alignment_strategy=None,
    )
    assert translate(tree).missing_features == []


def test_decoder_without_normalization_is_that_of_gpt():
    tree = copy.deepcopy(LLAMA_2_7B)
    del tree["model"]["normalization"]
    translation = translate(tree)
    assert translation.missing_features == ["a decoder that is not Llama's"]
    assert (
        get_reasons(translation.unsupported)["model.normalization"]
        == "default, not set; only RMSNorm"
    )


def test_only_references_to_keys_are_resolved():
    file = parse_nxdt_config(
        {
            "model_source": "${a.source}",
            "a": {"source": "hf", "b": "${.c}", "c": "${..d}", "l": ["${d}", 2], "e": "${.f.g}"},
            "d": 5,
            "loop": "${loop}",
            "list": ["${oc.env:X}"],
        }
    )
    assert file.is_hf
    assert file.settings["a.b"] == file.settings["a.c"] == 5
    assert file.settings["a.l"] == [5, 2]
    for key in ("a.e", "loop", "list"):
        assert isinstance(file.settings[key], UnresolvedValue)


@pytest.mark.parametrize("tree", [{}, [], "text", None, {"model_source": "x"}, {"trainer": {}}])
def test_other_files_are_rejected(tree):
    with pytest.raises(ConfigError, match="no model_source that is hf or megatron"):
        parse_nxdt_config(tree)


def test_flattened_keys_are_unique():
    file = parse_nxdt_config({"model_source": "hf", "a": {"b": 1}, "a.b": 2, 1: 3, "1": 4})
    assert [file.settings[key] for key in ("a.b", "['a.b']", "[1]", "1")] == [1, 2, 3, 4]


@pytest.mark.parametrize("tree", [LLAMA_2_7B, LLAMA_3_8B], ids=["megatron", "hf"])
def test_every_setting_is_listed_once(tree):
    file = parse_nxdt_config(tree, LLAMA_3_8B_CONFIG)
    result = nxdt.translate_nxdt_config(file, PRESETS)
    keys = [line.key for line in (*result.mapped, *result.unsupported, *result.redundant)]
    of_the_file = [key for key in keys if key in file.settings]
    assert sorted(of_the_file) == sorted(file.settings)


def test_key_tables_are_disjoint():
    tables = load_key_tables()
    names = ("cases", "supported_values", "redundant", "unsupported")
    keys = [*RULES, *(key for name in names for key in tables[name])]
    assert len(keys) == len(set(keys))


def test_documentation_contains_every_translated_key():
    text = (REPOSITORY / "docs/nxdt.md").read_text().split("## Precision")[0]
    rows = dict(re.findall(r"^\| `([^|]+)` \|([^|]*)\|", text, re.MULTILINE))
    rows = {key: row for keys, row in rows.items() for key in keys.split("`, `")}
    tables = load_key_tables()
    rules = {**RULES, **tables["cases"], **tables["copied"]}
    documented = {key.removeprefix(KEPT): to for key, to in rules.items()}
    assert set(documented) <= set(rows)
    others = {key.removeprefix(KEPT) for key in (*tables["supported_values"], *tables["redundant"])}
    assert set(rows) <= set(documented) | others
    for key, to in documented.items():
        assert not isinstance(to, str) or f"`{to.removeprefix('++')}`" in rows[key], key


def test_override_values_round_trip():
    values = [
        *(
            "a b",
            "a,b",
            'say "x"',
            "it's",
            "back\\",
            'back\\"',
            "x=y",
            "[1]",
            "{a: b}",
            "7b",
            "1e5",
        ),
        *("true", "null", "nan", "1_000", "", "--flag=a", "ü", "@x", "a:b", "$HOME/x", "*", "~"),
        *("#", "-1", "+x", "%", "(", "a  b", " a ", "0x10", "2024-01-01", 1, 1.5),
    ]
    args = [
        f"++compiler.environment.NEURON_X{i}={nxdt.format_override_value(value)}"
        for i, value in enumerate(values)
    ]
    flags = ["a b", "c,d", "--e=[f]", "true", "1"]
    actual = composition.compose_config(
        [*args, f"compiler.cc_flags={nxdt.format_override_value(flags)}"]
    ).compiler
    assert [actual.environment[f"NEURON_X{i}"] for i in range(len(values))] == list(
        map(str, values)
    )
    assert actual.cc_flags == flags


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "${oc.env:HOME}", b"x", {"a": 1}, object()])
def test_unsupported_override_values_are_rejected(value):
    with pytest.raises((TypeError, ValueError)):
        nxdt.format_override_value(value)


@pytest.mark.skipif(not PUBLISHED, reason="NXDT_SOURCE names no checkout of NxDT")
@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_the_published_examples_resolve(file):
    run = parse_nxdt_config(load_untrusted_yaml(file), LLAMA_3_8B_CONFIG)
    translation = nxdt.translate_nxdt_config(run, PRESETS)
    keys = [
        line.key for line in (*translation.mapped, *translation.unsupported, *translation.redundant)
    ]
    assert set(run.settings) <= set(keys)
    unknown = [line.key for line in translation.unsupported if line.reason == "no equivalent"]
    assert not unknown, "the tables do not know them"
    if "a decoder that is not Llama's" not in translation.missing_features:
        assert resolve_translation(translation)
