"""Every component on one process: generation, documents, compiled layers, recipes."""

import numpy as np
import pytest
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from hlat.inference.inference_model import InferenceModel
from tests.distributed import checks
from tests.support.model_components import COMPONENTS

PROMPT_LENGTHS = (1, 5, 12, 21)
"""Shorter and longer than the window."""
NUM_NEW_TOKENS = 8


@pytest.fixture(params=COMPONENTS)
def settings(request) -> list[str]:
    return COMPONENTS[request.param].split()


@pytest.fixture
def configure(compose):
    def make(*overrides: str) -> Config:
        micro_batch = ["batch.micro_batch_size=4", "model.num_layers=2"]
        return resolve_config(compose(*checks.MODEL, *micro_batch, *overrides))

    return make


@pytest.mark.slow_after(6)
def test_cached_generation_equals_full_forward_passes(configure, settings) -> None:
    """Greedy tokens from the KV cache are those of a forward pass over all tokens."""
    engine = NativeEngine()
    engine.build(configure("model.init_std=0.1", *settings), training=False)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 131, length).tolist() for length in PROMPT_LENGTHS]
    found = InferenceModel(engine, 200).generate(
        prompts, NUM_NEW_TOKENS, is_finished=lambda tokens: False
    )
    model = engine.model_parts[0]
    for prompt, result in zip(prompts, found, strict=True):
        tokens = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            logits = model.compute_logits(torch.tensor([tokens]))
            tokens.append(int(logits[0, -1].argmax()))
        assert result == tokens[len(prompt) :]
    engine.close()


def test_packing_does_not_change_the_logits_of_a_document(configure, settings) -> None:
    engine = NativeEngine()
    engine.build(configure("model.init_std=0.1", *settings), training=False)
    model = engine.model_parts[0]
    tokens = torch.randint(0, 131, (1, 40), generator=torch.Generator().manual_seed(0))
    lengths = [9, 1, 17, 13]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    logits = model.compute_logits(tokens, documents)[0]
    for part, result in zip(tokens[0].split(lengths), logits.split(lengths), strict=True):
        torch.testing.assert_close(
            result, model.compute_logits(part[None])[0], rtol=1e-4, atol=1e-5
        )
    engine.close()


@pytest.mark.slow  # a second per case; test_recipes.py has the recipes without components
@pytest.mark.parametrize("recipe", ["bf16", "mixed", "bf16_sr", "bf16_sr_master"])
def test_recipes_follow_fp32(configure, settings, recipe: str) -> None:
    expected = checks.train(configure(*settings), 3)
    found = checks.train(configure(*settings, f"precision={recipe}"), 3)
    for row, other in zip(found, expected, strict=True):
        assert row[0] == pytest.approx(other[0], rel=2e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # several warnings of torch
@pytest.mark.parametrize("mask", ["false", "true"])
def test_compiled_layers_equal_eager(configure, settings, mask: str) -> None:
    torch.compiler.reset()  # layers compiled by other tests count towards the recompile limit
    common = [f"data.document_mask={mask}", *settings]
    if "model.mlp.kind=moe" in settings:
        with pytest.raises(ConfigError, match="use compiler=none"):
            configure(*common, "compiler=inductor")
        return
    expected = checks.train(configure(*common), 2)
    found = checks.train(configure(*common, "compiler=inductor"), 2)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)
