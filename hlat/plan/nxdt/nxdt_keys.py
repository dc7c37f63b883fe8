"""Tables of NxDT's keys and defaults.

Each key is in one table. Meanings follow the code of NxDT, which in places differs from its
documentation.
"""

from typing import Any

from hlat.plan.nxdt import nxdt_precision
from hlat.plan.nxdt import translation_rules as rules
from hlat.plan.nxdt.key_translation import TranslationRule, map_to
from hlat.plan.nxdt.nxdt_config import MODEL_CONFIG_PREFIX as _CONFIG

_CHECKPOINT = "exp_manager.checkpoint_callback_params."
_ENVIRONMENT = "++compiler.environment."

KEY_RULES: dict[str, str | TranslationRule] = {
    "name": "model.name",
    "seed": "run.seed",
    "trainer.devices": rules.translate_devices,
    "trainer.num_nodes": "hardware.nodes",
    "trainer.lnc": rules.translate_logical_cores,
    "trainer.max_steps": "schedule.total_steps",
    "trainer.log_every_n_steps": "run.log_every",
    "trainer.gradient_clip_val": rules.translate_grad_clip,
    "trainer.val_check_interval": rules.translate_val_check_interval,
    "trainer.limit_val_batches": rules.translate_limit_val_batches,
    "exp_manager.name": rules.copy_unless_explicit_log_dir("run.name"),
    "exp_manager.exp_dir": rules.copy_unless_explicit_log_dir("run.root"),
    "exp_manager.explicit_log_dir": rules.translate_explicit_log_dir,
    "exp_manager.resume_from_checkpoint": rules.translate_resume_from_checkpoint,
    "exp_manager.async_checkpointing": "checkpoint.asynchronous",
    f"{_CHECKPOINT}every_n_train_steps": "checkpoint.every_steps",
    f"{_CHECKPOINT}save_top_k": rules.translate_save_top_k,
    "distributed_strategy.tensor_model_parallel_size": "parallelism.tp",
    "distributed_strategy.pipeline_model_parallel_size": "parallelism.pp",
    "distributed_strategy.virtual_pipeline_model_parallel_size": rules.translate_virtual_pipeline,
    "distributed_strategy.zero1": lambda config, value: map_to(
        {"parallelism.zero": 1 if value else 0}
    ),
    "distributed_strategy.sequence_parallel": lambda config, value: map_to(
        {
            "parallelism.sequence_parallel": bool(value)
            and config.get("distributed_strategy.tensor_model_parallel_size", 1) > 1
        }
    ),
    "data.micro_batch_size": "batch.micro_batch_size",
    "data.global_batch_size": "batch.global_batch_size",
    "data.seq_length": rules.translate_sequence_length,
    "data.eod_mask_loss": "data.loss_mask",
    "data.tokenizer.type": rules.translate_tokenizer,
    "model.model_config": rules.translate_model_config,
    "model.encoder_seq_length": "batch.sequence_length",
    "model.num_layers": rules.copy_unless_minus_one("model.num_layers"),
    "model.hidden_size": rules.copy_unless_minus_one("model.hidden_size"),
    "model.ffn_hidden_size": "model.intermediate_size",
    "model.num_attention_heads": "model.num_attention_heads",
    "model.num_kv_heads": rules.translate_key_value_heads,
    "model.rope_theta": rules.copy_unless_minus_one("model.rope_theta"),
    "model.position_freq_base": "model.rope_theta",
    "model.layernorm_epsilon": "model.rms_norm_eps",
    "model.share_embeddings_and_output_weights": "model.tie_embeddings",
    "model.init_method_std": "model.init_std",
    # Megatron scales output projections by 1 / sqrt(2 L) (gpt_model.py)
    "model.use_scaled_init_method": lambda config, value: map_to(
        {"model.scaled_init": "depth" if value else "none"}
    ),
    "model.sliding_window_size": rules.translate_sliding_window,
    "model.activations_checkpoint_granularity": rules.translate_activation_checkpointing,
    "model.do_layer_norm_weight_decay": rules.translate_decay_norms,
    "model.fusions.softmax": rules.translate_fused_softmax,
    "model.optim.name": rules.translate_optimizer,
    "model.optim.lr": "optimizer.lr",
    "model.optim.betas": rules.translate_betas,
    "model.optim.eps": "optimizer.eps",
    "model.optim.weight_decay": rules.translate_weight_decay,
    "model.optim.sched.name": rules.translate_lr_schedule,
    "precision.type": nxdt_precision.translate_precision,
    **{
        f"precision.{flag}": nxdt_precision.translate_manual_precision
        for flag in (
            *("master_weights", "fp32_grad_acc", "xla_use_bf16", "xla_downcast_bf16"),
            "neuron_rt_stochastic_rounding_en",
        )
    },
    "precision.parallel_layers_reduce_dtype": nxdt_precision.translate_reduce_dtype,
    "compiler_flags": rules.translate_compiler_flags,
    "compiler_cache_url": f"{_ENVIRONMENT}NEURON_COMPILE_CACHE_URL",
    "aync_exec_max_inflight_requests": f"{_ENVIRONMENT}NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
    "bucket_size_collectives": f"{_ENVIRONMENT}ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",
    "neuron_rt_exec_timeout": f"{_ENVIRONMENT}NEURON_RT_EXEC_TIMEOUT",
    "neuron_experimental_compress_rg": lambda config, value: map_to(
        {f"{_ENVIRONMENT}NEURON_EXPERIMENTAL_COMPRESS_RG": 1 if value is True else 0}
    ),
    f"{_CONFIG}num_hidden_layers": rules.copy_unless_in_yaml("model.num_layers"),
    f"{_CONFIG}hidden_size": rules.copy_unless_in_yaml("model.hidden_size"),
    f"{_CONFIG}intermediate_size": "model.intermediate_size",
    f"{_CONFIG}num_attention_heads": "model.num_attention_heads",
    f"{_CONFIG}num_key_value_heads": rules.translate_key_value_heads,
    f"{_CONFIG}vocab_size": "model.vocab_size",
    f"{_CONFIG}rope_theta": rules.copy_unless_in_yaml("model.rope_theta"),
    f"{_CONFIG}rms_norm_eps": "model.rms_norm_eps",
    f"{_CONFIG}tie_word_embeddings": "model.tie_embeddings",
    # hf models initialize every matrix with the same standard deviation (modeling_llama.py)
    f"{_CONFIG}initializer_range": lambda config, value: map_to(
        {"model.init_std": value, "model.scaled_init": "none"}
    ),
}
"""Key of hlat with the same value, or the rule, of each key that is translated."""

SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "trainer.max_epochs": ((-1, None), "runs end by steps"),
    "exp_manager.resume_if_exists": (
        (True,),
        "a run resumes from its own directory; another run.name starts from scratch",
    ),
    "exp_manager.create_checkpoint_callback": ((True,), "always saved; see checkpoint.every_steps"),
    f"{_CHECKPOINT}monitor": (("step", "max"), "the newest are kept"),
    f"{_CHECKPOINT}mode": (("step", "max"), "the newest are kept"),
    "distributed_strategy.context_parallel_size": ((1, None), "no context parallelism"),
    "distributed_strategy.expert_model_parallel_size": ((1, None), "no mixture of experts"),
    "distributed_strategy.token_shuffle_group_size": ((1, None), "no mixture of experts"),
    "distributed_strategy.pipeline_model_parallel_split_rank": ((0, None), "no encoder"),
    "model.fusions.ring_attention": ((False, None), "no context parallelism"),
    "model.pipeline_cuts": ((None,), "stages are cut evenly"),
    "model.normalization": (("rmsnorm",), "only RMSNorm"),
    "model.activation": (("swiglu",), "only SwiGLU"),
    "model.position_embedding_type": (("rope",), "only rotary embedding"),
    "model.transformer_block_type": (("pre_ln",), "only norms before attention and MLP"),
    "model.has_bias": ((False,), "no biases"),
    "model.rotary_percentage": ((1,), "all of a head is rotated"),
    "model.position_abf_factor": ((1,), "set model.rope_theta to the product"),
    "model.kv_channels": ((None,), "the head size is hidden_size / num_attention_heads"),
    "model.hidden_dropout": ((0,), "no dropout"),
    "model.attention_dropout": ((0,), "no dropout"),
    "model.ffn_dropout": ((0,), "no dropout"),
    "model.fp32_residual_connection": ((False,), "the residual stream has precision.compute"),
    "model.optim.sched.constant_steps": (
        (0, None),
        "hlat's cosine reaches min_lr with the last step",
    ),
    "data.reset_attention_mask": ((False,), "set data.document_mask=true; NxDT refuses it"),
    # NxDT resets positions and cannot reset the mask; hlat does both or neither
    "data.reset_position_ids": (
        (False, None),
        "positions restart only together with data.document_mask",
    ),
    f"{_CONFIG}rope_scaling": ((None,), "rotary frequencies are not rescaled"),
    f"{_CONFIG}hidden_act": (("silu",), "only SwiGLU"),
    f"{_CONFIG}attention_bias": ((False,), "no biases"),
    f"{_CONFIG}mlp_bias": ((False,), "no biases"),
    f"{_CONFIG}attention_dropout": ((0,), "no dropout"),
}
"""Values that equal hlat's behavior, and hlat's behavior for any other value."""

_REDUNDANT_KEYS_BY_REASON: dict[str, tuple[str, ...]] = {
    "hlat's decoder covers both": ("model_source",),
    "trainer.val_check_interval counts": ("trainer.check_val_every_n_epoch",),
    "a run evaluates before its first step": ("trainer.num_sanity_val_steps",),
    "NxDT never tests": ("trainer.limit_test_batches",),
    "weights are initialized shard by shard": ("trainer.sequential_move_factor",),
    "one rank logs": ("exp_manager.log_local_rank_0_only",),
    "metrics.jsonl and report.html": ("exp_manager.create_tensorboard_logger",),
    "a run without checkpoints starts": ("exp_manager.resume_ignore_no_checkpoint",),
    "always logged": ("exp_manager.log_parameter_norm", "exp_manager.log_gradient_norm"),
    "always in the report": ("exp_manager.enable_recovery_time_instrumentation",),
    "hlat has its own format": (
        "exp_manager.save_xser",
        "exp_manager.load_xser",
        "exp_manager.ckpt_ptl_version",
    ),
    "weights are saved in the optimizer's dtype": (
        "exp_manager.save_bf16",
        f"{_CHECKPOINT}use_master_weights_in_ckpt",
    ),
    "the end of a run is saved": (f"{_CHECKPOINT}save_last",),
    "checkpoints are named by step": (f"{_CHECKPOINT}filename",),
    "checkpoints are independent of the layout": (f"{_CHECKPOINT}model_parallel_size",),
    "follows from parallelism.tp": ("distributed_strategy.kv_replicator",),
    "Arrow files are memory-mapped": ("data.data_impl", "data.skip_warmup"),
    "the order is computed, not stored": ("data.index_mapping_dir",),
    "data.workers, which also tokenize": ("data.num_workers",),
    "documents are shuffled": ("data.dataloader_type",),
    "every evaluated sequence is full": ("data.validation_drop_last",),
    "targets include the next token": ("data.no_seqlen_plus_one_input_tokens",),
    "every batch is full": ("data.pad_samples_to_global_batch_size",),
    "data.tokenizer is a tokenizer.json": tuple(
        f"data.tokenizer.{key}"
        for key in (
            *("library", "model", "vocab_file", "merge_file", "delimiter"),
            *("sentencepiece_legacy", "use_fast"),
        )
    ),
    "rotary angles of any position are computed": (
        "model.max_position_embeddings",
        f"{_CONFIG}max_position_embeddings",
    ),
    "hlat has its own layout of q, k and v": ("model.qkv_linear", "model.fuse_qkv"),
    "the engine selects its attention": (
        "model.transpose_nki_inputs",
        "model.fusions.flash_attention",
    ),
    "initial weights are the same on every device": ("model.use_cpu_initialization",),
    "part of activations_checkpoint_granularity": ("model.activations_checkpoint_recompute",),
    "divides and multiplies again: the same result": ("model.apply_query_key_layer_scaling",),
    "model.vocab_size is not padded; set the size": ("model.make_vocab_size_divisible_by",),
    "a kernel for GPUs": ("model.persist_layer_norm",),
    "part of exp_manager.resume_from_checkpoint": ("model.weight_init_only",),
    "a detail of torch": ("model.optim.capturable",),
    "part of model.optim.sched.name": (
        "model.optim.sched.warmup_steps",
        "model.optim.sched.min_lr",
    ),
    "NxDT uses trainer.max_steps": ("model.optim.sched.max_steps",),
    "NxDT does not read it": (
        "data.use_sft_style_data_module",
        "model.fusions.do_layer_norm_weight_decay",
        "precision.fp32_grads_cc",
    ),
    "not part of training": tuple(
        f"{_CONFIG}{key}"
        for key in (
            *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype"),
            *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp"),
        )
    ),
    "NxDT uses hidden_size / num_attention_heads": (f"{_CONFIG}head_dim",),
}
REDUNDANT_KEYS = {key: reason for reason, keys in _REDUNDANT_KEYS_BY_REASON.items() for key in keys}
"""Keys that need no override for any value, with the reason."""

UNSUPPORTED_KEYS: dict[str, str] = {
    "model.moe.": "no mixture of experts",
    "model_alignment_strategy.": "hlat pre-trains",
    "data.train_dir": "hlat reads text and tokenizes it: set data.sources",
    "data.data_prefix": "hlat reads text and tokenizes it: set data.sources",
    "data.val_dir": "data.heldout_documents of each source are held out",
    "data.test_dir": "data.heldout_documents of each source are held out",
    "data.splits_string": "data.heldout_documents of each source are held out",
    "data.packing": "hlat pre-trains",
    "data.dev_choose_samples": "hlat pre-trains",
}
"""Keys without an equivalent, with the reason; a final dot includes all keys below."""

DEFAULT_VALUES: dict[str, dict[str, Any]] = {
    "both": {
        "trainer.num_nodes": 1,
        "trainer.log_every_n_steps": 50,
        "trainer.gradient_clip_val": None,
        "exp_manager.async_checkpointing": False,
        "distributed_strategy.pipeline_model_parallel_size": 1,
        "distributed_strategy.virtual_pipeline_model_parallel_size": 1,
        "distributed_strategy.zero1": True,
        "distributed_strategy.sequence_parallel": False,
        "model.activations_checkpoint_granularity": None,
        "model.do_layer_norm_weight_decay": False,
        "model.fusions.softmax": None,
        "model.optim.betas": [0.9, 0.999],
        "model.optim.weight_decay": 0.01,
        "model.optim.sched.name": None,
        "compiler_flags": "",
    },
    "megatron": {
        "model.normalization": "layernorm",
        "model.activation": "gelu",
        "model.position_embedding_type": "learned_absolute",
        "model.has_bias": True,
        "model.hidden_dropout": 0.1,
        "model.num_kv_heads": None,
        "model.layernorm_epsilon": 1e-5,
        "model.position_freq_base": 10000.0,
        "model.share_embeddings_and_output_weights": True,
        "model.init_method_std": 0.02,
        "model.use_scaled_init_method": True,
    },
    "hf": {
        f"{_CONFIG}num_key_value_heads": None,
        f"{_CONFIG}rms_norm_eps": 1e-6,
        f"{_CONFIG}rope_theta": 10000.0,
        f"{_CONFIG}tie_word_embeddings": False,
        f"{_CONFIG}initializer_range": 0.02,
    },
}
"""Defaults of NxDT, NeMo, Lightning and transformers, by model_source."""

SOURCE_SPECIFIC_KEYS: dict[str, set[str]] = {
    "hf": {"model.rope_theta", "model.model_config"},
    "megatron": {
        *DEFAULT_VALUES["megatron"],
        *("model.ffn_hidden_size", "model.num_attention_heads", "model.sliding_window_size"),
        *("model.rotary_percentage", "model.position_abf_factor", "model.kv_channels"),
        *("model.attention_dropout", "model.ffn_dropout", "model.transformer_block_type"),
        *("model.fp32_residual_connection", "data.reset_position_ids", "data.eod_mask_loss"),
        "data.reset_attention_mask",
    },
}
"""Keys that NxDT reads for models of one source only."""
