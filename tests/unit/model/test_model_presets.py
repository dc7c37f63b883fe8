"""Presets of models: published numbers of parameters, export, and tiny sizes."""

from pathlib import Path

import pytest

from hlat.config.resolve import resolve_config
from hlat.model.decoder_spec import count_active_parameters, count_parameters
from hlat.model.families import FAMILY_NAMES
from hlat.model.families.hugging_face_config import find_inexpressible_settings
from tests.support.model_families import load_preset

FOLDER = Path(__file__).resolve().parents[3] / "conf" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
TINY = [f"{family}_tiny" for family in FAMILY_NAMES]
WIDTHS = [f"tiny_w{width}" for width in (32, 64, 128, 256)]
"""Presets of the study of transfer over the width."""
LADDER = [f"ladder_{size}" for size in range(2, 8)]
"""Sizes of the ladder of scaling studies."""
EXPERTS = ["tiny_wide", "tiny_moe", "tiny_moe_bias"]
"""Presets of the study of experts."""
PUBLISHED = {
    "7b": 6_738_415_616,
    "13b": 13_015_864_320,
    "70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen25_3b": 3_085_938_688,
    "qwen25_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_v03": 7_248_023_552,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo3_7b": 7_298_011_136,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "smollm3_3b": 3_075_098_624,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "olmoe_1b_7b": 6_919_161_856,
}
"""Parameters of the published safetensors files; a tied head counts once."""


def test_every_preset_has_a_published_number_or_is_small() -> None:
    assert set(PRESETS) == {*PUBLISHED, *TINY, *WIDTHS, *LADDER, *EXPERTS, "tiny", "160m", "1b"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    model = load_preset(name)
    assert count_parameters(model) == PUBLISHED[name]
    assert f"{PUBLISHED[name]:,} parameters" in (FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_name_and_can_be_exported(name: str) -> None:
    model = load_preset(name)
    assert model.name == name
    assert find_inexpressible_settings(model) == []
    if name not in ("tiny", "160m", "1b", "7b", "13b", "70b", *WIDTHS, *LADDER, *EXPERTS):
        assert name.startswith((model.family, "qwen25", "qwen3_30b", "llama3"))


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_train_with_the_default_settings(compose, name: str) -> None:
    config = resolve_config(compose(f"model={name}"))
    assert config.model == load_preset(name)
    total, active = count_parameters(config.model), count_active_parameters(config.model)
    assert active < 2e6
    text = (FOLDER / f"{name}.yaml").read_text().partition("\n")[0]
    end = f", {active / 1e6:.1f} M active." if active < total else "."
    assert text.endswith(f" {total / 1e6:.1f} M parameters{end}")
    window = config.model.attention.sliding_window
    assert window is None or window < config.batch.sequence_length


def test_models_of_experts_have_the_parameters_of_dense_models() -> None:
    total, active = count_parameters, count_active_parameters
    sparse = load_preset("tiny_moe")
    assert active(sparse) == pytest.approx(total(load_preset("tiny")), rel=0.0025)
    assert total(sparse) == pytest.approx(total(load_preset("tiny_wide")), rel=0.0025)
    assert total(load_preset("tiny_moe_bias")) == total(sparse)


@pytest.mark.slow  # 7 s; test_configs.py composes the same models
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_presets_are_valid(compose, name: str) -> None:
    nodes = 64 if PUBLISHED[name] > 2e9 else 1
    hardware = ("hardware=trn1_32xl", f"hardware.nodes={nodes}")
    config = resolve_config(compose(f"model={name}", *hardware))
    assert config.model == load_preset(name)
