"""Keys of config.json without effect on the computation of a decoder, and required values.

Sources: PretrainedConfig and GenerationConfig of transformers 4.30 to 5.23, and the published
config.json of the supported families.
"""

IGNORED_KEYS = frozenset(
    {
        # Identity and format of the files
        "_commit_hash",
        "_name_or_path",
        "architectures",  # compared with the family
        "dtype",
        "model_type",  # selects the family
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        # Tokens
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "tokenizer_class",
        "unk_token_id",
        # Initialization and lengths; dynamic and yarn scaling read max_position_embeddings
        "initializer_range",
        "max_position_embeddings",
        # Split of matmuls with the same result (Llama, transformers 4)
        "pretraining_tp",
        # Code files, which are never loaded
        "auto_map",
        "trust_remote_code",
        # Implementation and output of the forward pass
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "attn_implementation",
        "cache_implementation",
        "chunk_size_feed_forward",
        "is_decoder",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tie_last_hidden_states",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        "use_return_dict",
        # Heads for other tasks
        "classifier_dropout",
        "cross_attention_hidden_size",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "prefix",
        "problem_type",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        # Settings of GenerationConfig
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        # Other programs
        "is_llama_config",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
    }
)

REQUIRED_VALUES = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "router_jitter_noise": 0.0,
    "use_bidirectional_attention": False,
    "use_mrope": False,
}
"""Only supported value of keys that change the computation, unless a mapping reads the key."""
