"""config.json of every family: written for transformers, read from it, and rejected by key."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.model.attention_spec import LayerType, QKNormScope
from hlat.model.computation_settings import find_differing_settings, replace_settings
from hlat.model.decoder_spec import count_parameters
from hlat.model.families import FAMILIES, FAMILY_NAMES
from hlat.model.families.hugging_face_config import (
    build_hf_config,
    find_hf_config_mismatches,
    find_inexpressible_settings,
    parse_hf_config,
)
from hlat.model.mlp_spec import Activation
from hlat.model.moe_spec import list_sparse_layers
from hlat.model.norm_spec import NormPlacement
from tests.support.model_families import (
    SCALINGS,
    UNSCALED,
    load_config_class,
)
from tests.support.model_families import (
    TINY_MODELS as TINY,
)

transformers = pytest.importorskip("transformers")

MODEL = ModelConfig(
    name="m",
    num_layers=2,
    hidden_size=96,
    intermediate_size=104,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=1031,
    rope_theta=500000.0,
    rms_norm_eps=1e-6,
)
HERE = build_hf_config(MODEL, 512, 7, Dtype.bf16)


FULL, SLIDING = LayerType.full, LayerType.sliding


def round_trip(model: ModelConfig, use_diff: bool = True) -> tuple[Any, dict[str, Any]]:
    """Return our config.json as transformers reads it, and as it writes it."""
    theirs = load_config_class(model.family).from_dict(build_hf_config(model, 512, 7, Dtype.bf16))
    return theirs, json.loads(theirs.to_json_string(use_diff=use_diff))


def test_families() -> None:
    assert (
        *("llama", "qwen2", "qwen3", "mistral", "olmo2", "olmo3", "gemma2", "gemma3", "smollm3"),
        *("arcee", "mixtral", "qwen3_moe", "olmoe"),
    ) == FAMILY_NAMES


def test_transformers_reads_every_field() -> None:
    result = transformers.LlamaConfig.from_dict(HERE)
    assert result.num_hidden_layers == 2
    assert result.num_key_value_heads == 2
    assert result.head_dim == 16
    assert result.vocab_size == 1031
    assert result.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert result.rms_norm_eps == 1e-6
    assert result.max_position_embeddings == 512
    assert (result.bos_token_id, result.eos_token_id, result.pad_token_id) == (None, 7, None)
    assert str(result.dtype).removeprefix("torch.") == "bfloat16"
    assert result.tie_word_embeddings is False


def test_transformers_reads_the_bos_token_of_the_run() -> None:
    config = build_hf_config(MODEL, 512, 7, Dtype.bf16, bos_token_id=5)
    result = transformers.LlamaConfig.from_dict(config)
    assert (result.bos_token_id, result.eos_token_id, result.pad_token_id) == (5, 7, None)


def test_transformers_4_finds_the_base_and_the_dtype_under_its_names() -> None:
    assert (HERE["rope_theta"], HERE["torch_dtype"]) == (500000.0, "bfloat16")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_transformers_reads_the_components_of_a_family(name: str) -> None:
    model = TINY[name]
    theirs, _ = round_trip(model)
    attention = model.attention
    assert theirs.model_type == FAMILIES[name].model_type
    assert theirs.head_dim == model.head_dim
    assert theirs.tie_word_embeddings == model.tie_embeddings
    assert theirs.rms_norm_eps == model.rms_norm_eps
    ropes = theirs.rope_parameters
    full = ropes.get("full_attention", ropes)
    assert full["rope_theta"] == model.rope_theta
    assert full["rope_type"] == model.rope.scaling.value.replace("none", "default")
    if attention.sliding_window is not None:
        assert theirs.sliding_window == attention.sliding_window < 256
    if model.rope.sliding_theta is not None:
        expected = {"rope_type": "default", "rope_theta": model.rope.sliding_theta}
        assert ropes["sliding_attention"] == expected
    if name.startswith("gemma"):
        assert theirs.query_pre_attn_scalar**-0.5 == attention.scale
        assert theirs.hidden_activation == "gelu_pytorch_tanh"
        assert theirs.attn_logit_softcapping == attention.logit_softcap
        assert theirs.final_logit_softcapping == model.head.logit_softcap
    if name == "smollm3":
        assert theirs.no_rope_layers == [1, 1, 1, 0]


@pytest.mark.parametrize("use_diff", [True, False])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_both_sides_write_the_same_model(name: str, use_diff: bool) -> None:
    model = TINY[name]
    ours = build_hf_config(model, 512, 7, Dtype.bf16)
    _, theirs = round_trip(model, use_diff)
    for config in (ours, theirs | {"architectures": ours["architectures"]}):
        assert find_hf_config_mismatches(model, config) == []
        parsed, _, dtype = parse_hf_config(config, "x")
        assert find_differing_settings(parsed, model) == []
        assert parsed.family == name
        assert dtype is Dtype.bf16


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_transformers_5_and_4_read_the_same_model(name: str) -> None:
    """Without rope_parameters, the keys are those of transformers 4, which 5 still reads."""
    ours = build_hf_config(TINY[name], 512, 7, Dtype.fp32)
    del ours["rope_parameters"]
    read = load_config_class(name).from_dict(ours)
    assert read.rope_parameters == round_trip(TINY[name])[0].rope_parameters
    assert find_hf_config_mismatches(TINY[name], ours) == []


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_default_of_a_configuration_class_is_read_as_transformers_reads_it(name: str) -> None:
    """Read a config.json with sizes only as the defaults of the class."""
    theirs = load_config_class(name)()
    written = json.loads(theirs.to_json_string(use_diff=False))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    settings = {key: written[key] for key in (*sizes, "vocab_size", "max_position_embeddings")}
    if name == "olmo3":
        settings["rope_theta"] = 500000.0  # its default differs between transformers 4 and 5
    short, _, _ = parse_hf_config(settings | {"model_type": written["model_type"]}, "x")
    full, positions, _ = parse_hf_config(written, "x")
    assert dataclasses.replace(short) == full
    assert positions == theirs.max_position_embeddings
    again, _ = round_trip(short)
    differences = {
        key
        for key, value in json.loads(again.to_json_string(use_diff=False)).items()
        if written.get(key) != value
    }
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert differences <= tokens | {"architectures", "dtype", "max_position_embeddings", "head_dim"}


@pytest.mark.parametrize(
    ("name", "scaling"), list(itertools.product(FAMILY_NAMES, SCALINGS)), ids="-".join
)
def test_scaled_rotary_embeddings(name: str, scaling: str) -> None:
    model = replace_settings(TINY[name], UNSCALED | SCALINGS[scaling])
    ours = build_hf_config(model, 512, 7, Dtype.fp32)
    theirs, written = round_trip(model)
    full = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert full["rope_type"] == scaling.replace("none", "default")
    if scaling in ("dynamic", "yarn"):
        factor = 4 if scaling == "yarn" else 1
        assert ours["max_position_embeddings"] == 8 * factor
    assert find_hf_config_mismatches(model, written | {"architectures": None}) == []
    del ours["rope_parameters"]
    assert find_hf_config_mismatches(model, ours) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"attention.qkv_bias": True, "attention.output_bias": True}),
        ("llama", {"mlp.activation": Activation.geglu, "attention.head_dim": 32}),
        ("qwen2", {"attention.sliding_window": 8, "attention.layer_pattern": [FULL, SLIDING]}),
        ("qwen2", {"attention.sliding_window": 8, "attention.head_dim": 48}),
        ("qwen3", {"attention.qkv_bias": True, "attention.output_bias": True}),
        (
            "qwen3",
            {"attention.sliding_window": 8, "attention.layer_pattern": [FULL, FULL, SLIDING]},
        ),
        ("mistral", {"attention.sliding_window": None}),
        ("mistral", {"attention.layer_pattern": [SLIDING, SLIDING]}),
        ("olmo2", {"attention.head_dim": 16}),
        ("olmo3", {"attention.sliding_window": None, "attention.layer_pattern": []}),
        ("gemma2", {"attention.logit_softcap": None, "head.logit_softcap": None}),
        ("gemma2", {"attention.layer_pattern": [FULL, FULL, SLIDING]}),
        ("gemma3", {"attention.layer_pattern": [], "head.logit_softcap": 20.0}),
        ("gemma3", {"attention.sliding_window": None, "attention.layer_pattern": []}),
        ("smollm3", {"rope.layer_pattern": []}),
        ("smollm3", {"attention.sliding_window": 8, "attention.layer_pattern": [SLIDING, FULL]}),
        ("smollm3", {"tie_embeddings": False}),
    ],
)
def test_variants_of_a_family(name: str, change: dict[str, Any]) -> None:
    model = replace_settings(TINY[name], change)
    _, written = round_trip(model)
    assert find_hf_config_mismatches(model, written | {"architectures": None}) == []
    parsed, _, _ = parse_hf_config(build_hf_config(model, 512, 7, Dtype.fp32), "x")
    assert find_differing_settings(parsed, model) == []


def test_missing_keys_have_the_defaults_of_transformers() -> None:
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
    ("num_key_value_heads", 6, "num_key_value_heads=2, this run has model.num_key_value_heads=6; set model.num_key_value_heads=2"),
    ("vocab_size", 131, "vocab_size=1031, this run has model.vocab_size=131; set model.vocab_size=1031"),
    ("rope_theta", 1e4, "rope_theta=500000.0, this run has model.rope_theta=10000.0; set model.rope_theta=500000.0"),
    ("rms_norm_eps", 1e-5, "rms_norm_eps=1e-06, this run has model.rms_norm_eps=1e-05; set model.rms_norm_eps=1e-06"),
    ("tie_embeddings", True, "tie_word_embeddings=false, this run has model.tie_embeddings=true; set model.tie_embeddings=false"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "sentence"), OTHER_SHAPES)
def test_a_mismatch_is_reported_with_an_override(name: str, value: Any, sentence: str) -> None:
    model = dataclasses.replace(MODEL, **{name: value})
    assert find_hf_config_mismatches(model, HERE)[0] == f"config.json has {sentence}"


def test_several_differences_end_with_one_line_of_overrides() -> None:
    model = dataclasses.replace(MODEL, num_layers=4, vocab_size=131)
    assert (
        find_hf_config_mismatches(model, HERE)[-1]
        == "to set them all: model.num_layers=2 model.vocab_size=1031"
    )


def test_the_components_of_another_family() -> None:
    model = replace_settings(TINY["qwen3"], {"attention.qk_norm": False, "family": "llama"})
    config = build_hf_config(TINY["qwen3"], 512, 7, Dtype.fp32)
    assert find_hf_config_mismatches(model, config) == [
        'config.json has model_type="qwen3", this run has model.family=llama; set model.family=qwen3',
        "config.json has model.attention.qk_norm=true, this run has model.attention.qk_norm=false; "
        "set model.attention.qk_norm=true",
        "to set them all: model.family=qwen3 model.attention.qk_norm=true",
    ]


def test_another_family_with_the_same_computation_fits() -> None:
    config = build_hf_config(dataclasses.replace(MODEL, family="mistral"), 512, 7, Dtype.fp32)
    assert config["model_type"] == "mistral"
    assert find_hf_config_mismatches(MODEL, config) == []


def test_missing_sizes_are_reported() -> None:
    settings = {key: value for key, value in HERE.items() if key != "vocab_size"}
    assert find_hf_config_mismatches(MODEL, settings) == ["config.json has no vocab_size"]
    settings = {k: v for k, v in HERE.items() if k != "max_position_embeddings"}
    with pytest.raises(ConfigError, match=r"^x: config\.json has no max_position_embeddings$"):
        parse_hf_config(settings, "x")


ROPE = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
KNOWN = ", ".join(f"{f.model_type} [{f.architecture}]" for f in FAMILIES.values())
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
     f'config.json has model_type="gpt2" architectures=["GPT2LMHeadModel"]; hlat supports only {KNOWN}'),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]},
     f'config.json has model_type="llama" architectures=["LlamaForSequenceClassification"]; hlat supports only {KNOWN}'),
    ("gemma3", {"model_type": "gemma3"},
     f'config.json has model_type="gemma3" architectures=["Gemma3ForCausalLM"]; hlat supports only {KNOWN}; '
     "save the text model of Gemma 3, model_type=gemma3_text"),
    ("llama", {"mlp_bias": True}, "config.json has mlp_bias=true; hlat supports only mlp_bias=false"),
    ("mistral", {"attention_bias": True},
     "config.json has attention_bias=true; hlat supports only attention_bias=false"),
    ("llama", {"attention_dropout": 0.1},
     "config.json has attention_dropout=0.1; training applies no dropout; set it to 0.0 in config.json"),
    ("llama", {"hidden_act": "gelu"},
     'config.json has hidden_act="gelu"; hlat supports only silu, gelu_pytorch_tanh'),
    ("llama", {"quantization_config": {"quant_method": "gptq"}},
     "config.json has quantization_config; use a directory with weights that are not quantized"),
    ("llama", {"clip_qkv": 8.0},
     "config.json has clip_qkv=8.0, which is not supported with model_type=llama; remove it if it does not change the computation"),
    ("llama", {"sliding_window": 64},
     "config.json has sliding_window=64, which is not supported with model_type=llama; remove it if it does not change the computation"),
    ("gemma3", {"attn_logit_softcapping": 50.0},
     "config.json has attn_logit_softcapping=50.0, which is not supported with model_type=gemma3_text; remove it if it does not change the computation"),
    ("gemma2", {"use_bidirectional_attention": True},
     "config.json has use_bidirectional_attention=true; hlat supports only use_bidirectional_attention=false"),
    ("llama", {"hidden_size": "96"}, 'config.json has hidden_size="96", which is not an integer'),
    ("llama", {"rms_norm_eps": -1.0}, "config.json: model.rms_norm_eps=-1.0 is outside (0, inf)"),
    ("llama", {"num_attention_heads": 7, "head_dim": 16},
     "num_attention_heads=7 does not divide hidden_size=96, which transformers requires of llama"),
    ("llama", {"rope_theta": 1e4}, "config.json has rope_theta=10000.0, rope_parameters.rope_theta=500000.0, "
        "which differ; remove one of them"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}},
     'config.json has rope_scaling={"type": "linear", "factor": 2} and rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, which differ; remove one of them'),
    ("llama", {"rope_scaling": "linear"}, 'config.json has rope_scaling={"rope_type": "linear"} without factor'),
    ("llama", {"rope_scaling": [1]}, "config.json has rope_scaling=[1], which is no JSON object"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}},
     'config.json has rope_parameters={"rope_type": "longrope"}; hlat supports only the types default, linear, dynamic, llama3, yarn'),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
     'config.json has rope_parameters={"rope_type": "llama3", "factor": 8.0} without low_freq_factor'),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "long_factor": [1.0]}},
     'config.json has rope_parameters={"rope_type": "linear", "factor": 2.0, "long_factor": [1.0]}; long_factor is no key of type linear'),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}},
     'config.json has rope_parameters={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}; '
     "transformers ignores original_max_position_embeddings of type dynamic and uses max_position_embeddings=512"),
    ("llama", {"partial_rotary_factor": 0.5},
     "config.json has partial_rotary_factor=0.5; transformers rotates whole heads in this family"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "config.json has rope_parameters.partial_rotary_factor=0.5; transformers rotates whole heads in this family"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
     'config.json has rope_parameters.factor="2", which is not a number'),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}},
     "config.json has rope_type in rope_parameters; hlat supports only full_attention, sliding_attention"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     'config.json has rope_parameters.sliding_attention={"rope_type": "linear", "factor": 2.0}; hlat supports no scaling of sliding layers in this family'),
    (
        "gemma3",
        {"rope_local_base_freq": 7.0},
        "config.json has rope_local_base_freq=7.0, "
        "rope_parameters.sliding_attention.rope_theta=10000.0, which differ; remove one of them",
    ),
    ("olmo3", {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
     "config.json has rope_theta=500000.0 of full and 10000.0 of sliding layers; hlat supports only equal values in this family"),
    ("olmo3", {"rope_scaling": {**ROPE, "rope_theta": 5e5, "truncate": False}},
     "config.json has truncate=false, which transformers 5 ignores"),
    ("olmo3", {"rope_scaling": None, "rope_parameters": None, "rope_theta": 1e4},
     "config.json has rope_theta=10000.0 without rope_parameters; transformers 4 and 5 use different bases in sliding layers; add rope_parameters="
     '{"full_attention": {"rope_type": "default", "rope_theta": ...}, "sliding_attention": {...}} to config.json'),
    ("olmo3", {"sliding_window": None}, "config.json has sliding_attention in layer_types, but no sliding_window"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4},
     "config.json has sliding_attention in layer_types, but no sliding_window or use_sliding_window=false"),
    ("qwen2", {"layer_types": ["full_attention"]},
     'config.json has layer_types=["full_attention"], which is no list of num_hidden_layers=4 types'),
    ("gemma2", {"layer_types": ["full_attention", "chunked_attention"] * 2},
     'config.json has "chunked_attention" in layer_types; hlat supports only full_attention, sliding_attention'),
    ("gemma2", {"query_pre_attn_scalar": 0}, "config.json has query_pre_attn_scalar=0; it must be positive"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "config.json has sliding_window_pattern=0; it must be positive"),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 0]},
     "config.json has no_rope_layers=[1, 2, 1, 0], which is no list of 0 and 1 for num_hidden_layers=4"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "config.json has no_rope_layer_interval=0; use 1 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "sentence"), UNSUPPORTED)
def test_unsupported_keys(name: str, change: dict[str, Any], sentence: str) -> None:
    model = MODEL if name == "llama" else TINY[name]
    config = build_hf_config(model, 512, 7, Dtype.fp32) | change
    assert find_hf_config_mismatches(model, config) == [sentence]


def test_every_problem_is_listed() -> None:
    config = HERE | {"mlp_bias": True, "clip_qkv": 1, "hidden_size": None}
    assert len(find_hf_config_mismatches(MODEL, config)) == 3


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            [FULL, SLIDING],
        ),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, []),
        ({"use_sliding_window": True, "sliding_window": 9}, None),
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}, None),
    ],
)
def test_windows_of_qwen(change: dict[str, Any], windows: list[LayerType] | None) -> None:
    """Configurations of transformers before 4.53 have no layer_types."""
    config = build_hf_config(dataclasses.replace(TINY["qwen3"], num_layers=2), 512, 7, Dtype.fp32)
    config = {k: v for k, v in config.items() if k != "layer_types"} | change
    attention = parse_hf_config(config, "x")[0].attention
    assert attention.sliding_window == (None if windows is None else 9)
    assert attention.layer_pattern == (windows or [])
    theirs = load_config_class("qwen3").from_dict(config)
    expected = {None: [FULL, FULL], 0: [SLIDING, SLIDING]}.get(
        None if windows is None else len(windows), windows
    )
    assert [name.removesuffix("_attention") for name in theirs.layer_types] == [
        layer_type.value for layer_type in expected or []
    ]


def test_mscale_of_yarn_is_a_factor() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 2.0}
    rope["original_max_position_embeddings"] = 128
    rope["rope_theta"] = MODEL.rope_theta
    config = HERE | {"rope_parameters": rope}
    model, _, _ = parse_hf_config(config, "x")
    theirs = transformers.LlamaConfig.from_dict(json.loads(json.dumps(config)))
    _, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert model.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert find_inexpressible_settings(model) == []


def test_other_programs_add_keys_without_effect() -> None:
    added = {"_name_or_path": "x", "temperature": 0.6, "unsloth_fixed": True, "clip_qkv": None}
    assert find_hf_config_mismatches(MODEL, HERE | added) == []


INEXPRESSIBLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"attention.qkv_bias": True},
     ["model.attention.qkv_bias=true cannot be exported with model.family=llama; use model.family=qwen2 or model.attention.qkv_bias=false"]),
    ("llama", {"attention.qk_norm": True},
     ["model.attention.qk_norm=true cannot be exported with model.family=llama; use model.family=qwen3 or model.attention.qk_norm=false"]),
    ("llama", {"attention.qk_norm": True, "attention.qk_norm_scope": QKNormScope.projection, "norm.placement": NormPlacement.post},
     ["model.attention.qk_norm=true cannot be exported with model.family=llama; use model.family=olmo2 or model.attention.qk_norm=false",
      "model.attention.qk_norm_scope=projection cannot be exported with model.family=llama; use model.family=olmo2 or model.attention.qk_norm_scope=head",
      "model.norm.placement=post cannot be exported with model.family=llama; use model.family=olmo2 or model.norm.placement=pre"]),
    ("llama", {"attention.sliding_window": 64},
     ["model.attention.sliding_window=64 cannot be exported with model.family=llama; use model.family=mistral or model.attention.sliding_window=null"]),
    ("mistral", {"attention.layer_pattern": [SLIDING, FULL], "attention.sliding_window": 64},
     ["model.attention.sliding_window=64 cannot be exported with model.family=mistral; use model.family=smollm3 or model.attention.sliding_window=null",
      "model.attention.layer_pattern=[sliding,full] cannot be exported with model.family=mistral; use model.family=smollm3 or model.attention.layer_pattern=[]"]),
    ("llama", {"attention.sinks": True},
     ["model.attention.sinks=true cannot be exported with model.family=llama; use model.attention.sinks=false"]),
    ("llama", {"attention.scale": 0.5},
     ["model.attention.scale=0.5 cannot be exported with model.family=llama; use model.attention.scale=null"]),
    ("llama", {"mlp.activation": Activation.relu2},
     ["model.mlp.activation=relu2 cannot be exported with model.family=llama; use model.family=arcee or model.mlp.activation=swiglu"]),
    ("llama", {"residual_multiplier": 0.5},
     ["model.residual_multiplier=0.5 cannot be exported with model.family=llama; use model.residual_multiplier=1.0"]),
    ("llama", {"embedding.multiplier": 2.0},
     ["model.embedding.multiplier=2.0 cannot be exported with model.family=llama; use model.embedding.multiplier=1.0"]),
    ("llama", {"head.logit_softcap": 30.0},
     ["model.head.logit_softcap=30.0 cannot be exported with model.family=llama; use model.head.logit_softcap=null"]),
    ("llama", {"rope.partial_rotary_factor": 0.5},
     ["model.rope.partial_rotary_factor=0.5 cannot be exported with model.family=llama; use model.rope.partial_rotary_factor=1.0"]),
    ("llama", {"rope.layer_pattern": [True, False]},
     ["model.rope.layer_pattern=[true,false] cannot be exported with model.family=llama; use model.family=smollm3 or model.rope.layer_pattern=[]"]),
    ("llama", {"norm.zero_centered": True},
     ["model.norm.zero_centered=true cannot be exported with model.family=llama; use model.norm.zero_centered=false"]),
    ("gemma2", {"attention.scale": 0.15},
     ["model.attention.scale=0.15 cannot be exported with model.family=gemma2; use model.attention.scale=0.15075567228888181"]),
    ("gemma2", {"attention.qk_norm": True},
     ["model.attention.qk_norm=true cannot be exported with model.family=gemma2; use model.attention.qk_norm=false"]),
    ("gemma3", {"attention.logit_softcap": 50.0},
     ["model.attention.logit_softcap=50.0 cannot be exported with model.family=gemma3; use model.attention.logit_softcap=null"]),
    ("olmo3", {"rope.sliding_theta": None},
     ["model.rope.sliding_theta=null cannot be exported with model.family=olmo3; use model.rope.sliding_theta=500000.0"]),
    ("olmo3", {"rope.sliding_theta": 1e4},
     ["model.family=olmo3 cannot express this model: config.json has rope_theta=500000.0 of full and 10000.0 of sliding layers; "
      "hlat supports only equal values in this family"]),
    ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "attention.head_dim": 16},
     ["model.family=llama cannot express this model: num_attention_heads=5 does not divide hidden_size=96, which transformers requires of llama"]),
    ("gpt2", {}, [f"model.family=gpt2 is unknown; use {', '.join(FAMILY_NAMES)}"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "sentences"), INEXPRESSIBLE)
def test_a_setting_that_a_family_cannot_express(
    name: str, change: dict[str, Any], sentences: list[str]
) -> None:
    base = TINY.get(name, MODEL) if name not in ("llama", "mistral") else MODEL
    model = replace_settings(base, {"family": name, **change})
    assert find_inexpressible_settings(model) == sentences
    with pytest.raises(ConfigError) as refused:
        build_hf_config(model, 512, 7, Dtype.fp32)
    assert list(refused.value.problems) == sentences


def test_training_settings_do_not_matter_to_an_export() -> None:
    model = replace_settings(MODEL, {"head.z_loss": 1e-4, "init_std": 0.01})
    assert build_hf_config(model, 512, 7, Dtype.fp32)["initializer_range"] == 0.01


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [
        (1, [], [0, 1, 2, 3, 4, 5]),
        (1, None, [0, 1, 2, 3, 4, 5]),
        (1, [1, 0], [2, 3, 4, 5]),
        (2, [], [1, 3, 5]),
        (2, [1], [3, 5]),
        (2, [0, 1, 2, 4], [3, 5]),
        (3, [2], [5]),
    ],
)
def test_sparse_layers_are_those_of_transformers(step: int, dense, expected: list[int]) -> None:
    settings = build_hf_config(TINY["qwen3_moe"], 512, 0, Dtype.fp32)
    settings |= {"decoder_sparse_step": step, "mlp_only_layers": dense, "num_hidden_layers": 6}
    model = parse_hf_config(settings, "x")[0]
    assert list_sparse_layers(model) == expected
    written = build_hf_config(model, 512, 0, Dtype.fp32)
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3MoeConfig.from_dict(written)
        )
    found = [n for n, layer in enumerate(peer.model.layers) if hasattr(layer.mlp, "experts")]
    assert found == expected
    assert count_parameters(model) == sum(one.numel() for one in peer.parameters())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"mlp_only_layers": [0, 2]},
            r"mlp_only_layers=\[0, 2\]; hlat supports only first layers, such as \[0, 1, 2\]",
        ),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3, which is no list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0; use 1 or more"),
    ],
)
def test_refused_sparse_layers(keys: dict[str, Any], message: str) -> None:
    settings = build_hf_config(TINY["qwen3_moe"], 512, 0, Dtype.fp32)
    with pytest.raises(ConfigError, match=message):
        parse_hf_config(settings | keys, "x")
