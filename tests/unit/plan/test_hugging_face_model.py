"""Plan of the model of a config.json that transformers has written."""

import json

import pytest
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import convert_to_dataclasses
from hlat.model.decoder_spec import count_parameters
from hlat.model.families import FAMILIES, FAMILY_NAMES
from hlat.plan import __main__ as plan
from hlat.plan.hugging_face_model import build_model_overrides

transformers = pytest.importorskip("transformers")

RAGGED = {
    "hidden_size": 210,
    "num_attention_heads": 14,
    "num_key_value_heads": 7,
    "intermediate_size": 413,
    "num_hidden_layers": 13,
    "vocab_size": 50257,
    "max_position_embeddings": 1000,
    "head_dim": 26,
}
"""Sizes of which none is a multiple of another or a power of two."""
UNSUPPORTED = {"head_dim": ("olmo2", "olmo3", "olmoe", "qwen2", "smollm3")}
"""Families of which transformers derives the head size from the hidden size."""


def _build(family, settings):
    config = transformers.AutoConfig.for_model(FAMILIES[family].model_type, **settings)
    config.architectures = [FAMILIES[family].architecture]
    return config


def _save(config, directory):
    directory.mkdir(exist_ok=True)
    config.save_pretrained(directory)
    return directory / "config.json"


def _count_their_parameters(config):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).num_parameters()


def _compose(compose, file, *overrides):
    return convert_to_dataclasses(compose(*build_model_overrides(file, overrides), *overrides))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ragged_models_have_the_parameters_of_transformers(family, tmp_path, compose):
    settings = {k: v for k, v in RAGGED.items() if family not in UNSUPPORTED.get(k, ())}
    settings["pad_token_id"] = None
    config = _build(family, settings)
    run = _compose(compose, _save(config, tmp_path / "Ragged-1.5"))
    assert count_parameters(run.model) == _count_their_parameters(config)
    assert run.model.name == "Ragged-1.5"
    assert run.model.family == family
    assert run.batch.sequence_length <= 1000


REAL = {
    "llama": {  # Llama-3.2-1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "qwen3": {  # Qwen3-8B
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "head_dim": 128,
    },
    "mixtral": {},  # Mixtral-8x7B
}
PUBLISHED = {"llama": 1_235_814_400, "qwen3": 8_190_735_360, "mixtral": 46_702_792_704}
"""Parameters on the pages of the models at Hugging Face."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", REAL)
def test_published_models_have_the_published_parameters(family, tmp_path, compose):
    file = _save(_build(family, REAL[family]), tmp_path / "real")
    run = _compose(compose, file, "model.init_std=0.5")
    assert count_parameters(run.model) == PUBLISHED[family]
    assert run.model.init_std == 0.5
    assert run.batch.sequence_length == (2048 if family == "llama" else 4096)


@pytest.mark.slow
def test_plan_of_a_config_json(tmp_path, capsys):
    file = _save(_build("qwen3", REAL["qwen3"]), tmp_path / "Qwen3-8B")
    arguments = [f"config_json={file}", "hardware=h100_p5", "hardware.nodes=2"]
    assert plan.main([*arguments, "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert plan.main(["model=qwen3_8b", *arguments[1:], "json=true"]) == 0
    preset = json.loads(capsys.readouterr().out)
    assert found["parameters"] == preset["parameters"]
    assert found["memory"] == preset["memory"]
    assert found["throughput"]["step"] == preset["throughput"]["step"]
    assert plan.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("Qwen3-8B in mixed on 2 nodes of p5.48xlarge")
    command = out.splitlines()[-1]
    assert command.startswith("to train this model: hlat train model=llama3_8b model.name=Qwen3-8B")
    assert "model.num_layers=36" in command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 40', "cannot be read: "),
        ("[1]", "cannot be read: it is not a JSON object"),
        ('{"model_type": "gpt2"}', 'config.json has model_type="gpt2" architectures=null; hlat'),
        ('{"model_type": "llama"}', "config.json has no hidden_size"),
    ],
)
def test_files_that_are_no_supported_model(tmp_path, capsys, text, message):
    file = tmp_path / "config.json"
    file.write_text(text)
    assert plan.main([f"config_json={file}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hlat: {file}")
    assert message in error
    assert "Traceback" not in error


def test_unsupported_key_is_named(tmp_path):
    config = _build("llama", RAGGED).to_dict() | {"hidden_size": 364, "mlp_bias": True}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json has mlp_bias=true; hlat supports only"):
        build_model_overrides(file, [])


def test_another_model_and_misspelled_settings_are_errors(tmp_path, capsys):
    file = _save(_build("llama", RAGGED), tmp_path / "other")
    for word, error in {
        "model=7b": f"config_json={file} and model= both select a model; remove one",
        "experiment=hlat_7b": f"config_json={file} and experiment= both select a model; remove one",
        "budget_us=3": "budget_us= is not a setting of hlat plan; did you mean budget_usd=?",
    }.items():
        assert plan.main([f"config_json={file}", word]) == 2
        assert capsys.readouterr().err == f"hlat: {error}\n"
    assert plan.main([f"config_jsn={file}", "hardware=h100_p5"]) == 2
    error = "config_jsn= is not a setting of hlat plan; did you mean config_json=?"
    assert capsys.readouterr().err == f"hlat: {error}\n"
