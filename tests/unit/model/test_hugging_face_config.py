"""config.json as transformers reads and writes it, and what this Llama refuses to be."""

import dataclasses
import json
from typing import Any

import pytest

from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.model.hugging_face_config import build_hf_config, find_hf_config_mismatches

transformers = pytest.importorskip("transformers")

MODEL = ModelConfig("m", 2, 96, 104, 6, 2, 1031, rope_theta=500000.0, rms_norm_eps=1e-6)
HERE = build_hf_config(MODEL, 512, 7, Dtype.bf16)


@pytest.fixture(scope="module")
def hf_config() -> dict[str, Any]:
    """The config.json that transformers writes of ours."""
    settings = transformers.LlamaConfig.from_dict(HERE).to_json_string(use_diff=True)
    return dict(json.loads(settings))


def test_transformers_reads_every_field() -> None:
    result = transformers.LlamaConfig.from_dict(HERE)
    assert result.num_hidden_layers == 2
    assert result.num_key_value_heads == 2
    assert result.head_dim == 16
    assert result.vocab_size == 1031
    assert result.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert result.rms_norm_eps == 1e-6
    assert result.max_position_embeddings == 512
    assert (result.bos_token_id, result.eos_token_id) == (None, 7)
    assert str(result.dtype).removeprefix("torch.") == "bfloat16"
    assert result.tie_word_embeddings is False


def test_transformers_4_finds_the_base_and_the_dtype_under_its_names() -> None:
    assert (HERE["rope_theta"], HERE["torch_dtype"]) == (500000.0, "bfloat16")


@pytest.mark.parametrize("tied", [False, True])
def test_what_either_side_writes_fits(hf_config: dict[str, Any], tied: bool) -> None:
    model = dataclasses.replace(MODEL, tie_embeddings=tied)
    assert find_hf_config_mismatches(model, build_hf_config(model, 512, 7, Dtype.fp32)) == []
    assert find_hf_config_mismatches(model, hf_config | {"tie_word_embeddings": tied}) == []


def test_missing_keys_mean_what_transformers_takes_for_them() -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    settings = {key: HERE[key] for key in (*sizes, "vocab_size", "model_type")}
    plain = transformers.LlamaConfig.from_dict(settings)
    model = dataclasses.replace(
        MODEL, num_key_value_heads=6, rope_theta=10000.0, rms_norm_eps=plain.rms_norm_eps
    )
    assert plain.num_key_value_heads == 6
    assert plain.rope_parameters["rope_theta"] == 10000.0
    assert find_hf_config_mismatches(model, settings) == []


OTHER_SHAPES = [
    ("num_layers", 3, "num_hidden_layers=2, this run has model.num_layers=3; set model.num_layers=2"),
    ("hidden_size", 48, "hidden_size=96, this run has model.hidden_size=48; set model.hidden_size=96"),
    ("intermediate_size", 8, "intermediate_size=104, this run has model.intermediate_size=8; set model.intermediate_size=104"),
    ("num_attention_heads", 4, "num_attention_heads=6, this run has model.num_attention_heads=4; set model.num_attention_heads=6"),
    ("num_key_value_heads", 6, "num_key_value_heads=2, this run has model.num_key_value_heads=6; set model.num_key_value_heads=2"),
    ("vocab_size", 131, "vocab_size=1031, this run has model.vocab_size=131; set model.vocab_size=1031"),
    ("rope_theta", 1e4, "rope_theta=500000.0, this run has model.rope_theta=10000.0; set model.rope_theta=500000.0"),
    ("rms_norm_eps", 1e-5, "rms_norm_eps=1e-06, this run has model.rms_norm_eps=1e-05; set model.rms_norm_eps=1e-06"),
    ("tie_embeddings", True, "tie_word_embeddings=false, this run has model.tie_embeddings=true; set model.tie_embeddings=false"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "sentence"), OTHER_SHAPES)
def test_another_shape(name: str, value: Any, sentence: str) -> None:
    model = dataclasses.replace(MODEL, **{name: value})
    assert find_hf_config_mismatches(model, HERE) == [f"config.json has {sentence}"]


def test_several_differences_end_in_one_line_to_copy() -> None:
    model = dataclasses.replace(MODEL, num_layers=4, vocab_size=131)
    assert (
        find_hf_config_mismatches(model, HERE)[-1]
        == "to set them all: model.num_layers=2 model.vocab_size=1031"
    )


def test_a_missing_size_is_told() -> None:
    settings = {key: value for key, value in HERE.items() if key != "vocab_size"}
    assert find_hf_config_mismatches(MODEL, settings) == ["config.json has no vocab_size"]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
UNSUPPORTED = [
    (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        'config.json has model_type="mistral" architectures=["MistralForCausalLM"]; hlat '
        'supports only "llama" ["LlamaForCausalLM"]',
    ),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        'config.json has model_type="llama" architectures=["LlamaForSequenceClassification"]; '
        'hlat supports only "llama" ["LlamaForCausalLM"]',
    ),
    (
        {"attention_bias": True},
        "config.json has attention_bias=true; hlat supports only attention_bias=false",
    ),
    ({"mlp_bias": True}, "config.json has mlp_bias=true; hlat supports only mlp_bias=false"),
    (
        {"hidden_act": "gelu"},
        'config.json has hidden_act="gelu"; hlat supports only hidden_act="silu"',
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        'config.json has rope_scaling={"type": "linear", "factor": 2}; '
        "hlat does not support scaled rotary embeddings",
    ),
    (
        {"rope_parameters": LLAMA3},
        'config.json has rope_parameters={"rope_type": "llama3", "factor": 8.0}; '
        "hlat does not support scaled rotary embeddings",
    ),
    (
        {"rope_scaling": "linear"},
        'config.json has rope_scaling={"rope_type": "linear"}; hlat does not support scaled rotary embeddings',
    ),
    (
        {"rope_theta": 1e4},  # transformers 4 reads this one, transformers 5 the other
        "config.json has several rope_theta: 10000.0, 500000.0",
    ),
    (
        {"head_dim": 64},
        "config.json has head_dim=64 x num_attention_heads=6, but hidden_size=96; hlat "
        "requires the product to equal the hidden size",
    ),
    (
        {"quantization_config": {"quant_method": "gptq"}},
        "config.json has quantization_config; use a directory with weights that are not quantized",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), UNSUPPORTED)
def test_what_this_llama_is_not(change: dict[str, Any], sentence: str) -> None:
    assert find_hf_config_mismatches(MODEL, HERE | change) == [sentence]
