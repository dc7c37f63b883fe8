"""A model of transformers is imported, trained, exported and loaded by transformers again.

docs/generate_family_table.py writes the results to docs/models.md.
"""

import dataclasses
import functools
import json
import shutil

import pytest
import torch

from hlat import export
from hlat.checkpoint.hugging_face.pretrained_weights import load_pretrained
from hlat.config.model import ModelConfig
from hlat.data.tokenizer import EMBEDDED_EOS_TOKEN, EMBEDDED_FILE
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.families import FAMILY_NAMES
from hlat.model.loss import build_next_token_targets, linear_cross_entropy
from tests.run.conftest import call_command
from tests.support.model_families import (
    TINY_MODELS,
    build_transformers_model,
    get_canonical_tensors,
)

transformers = pytest.importorskip("transformers")

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def load_decoder(folder, model: ModelConfig) -> Decoder:
    """Return a decoder with the weights of a folder."""
    decoder = Decoder(model)
    shapes = {spec.name: spec.shape for spec in list_parameter_specs(model)}
    shards = [
        StateShard(f"weights/{name}", shapes[name], (0,) * len(shapes[name]), shapes[name], view)
        for name, view in get_canonical_tensors(decoder).items()
    ]
    load_pretrained(str(folder), model, shards)
    return decoder


@torch.no_grad()
def compute_losses(folder, model: ModelConfig) -> tuple[float, float]:
    """Return the loss of a folder by hlat and by transformers."""
    tokens = torch.randint(0, model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    peer, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loaded.values()), loaded
    decoder, targets = load_decoder(folder, model), build_next_token_targets(tokens)
    loss = linear_cross_entropy(
        decoder(tokens),
        decoder.lm_head_weight,
        targets,
        1 / int((targets >= 0).sum()),
        softcap=model.head.logit_softcap,
    )
    return float(loss), float(peer.float()(tokens, labels=tokens).loss)


@pytest.mark.slow  # one or more whole processes
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_losses_agree_before_and_after_training(runner, record_property, family):
    record_property("family", family)
    record_property("column", "import")
    record_property("column", "export")
    tiny = TINY_MODELS[family]
    model = dataclasses.replace(tiny, hidden_size=64, intermediate_size=176)
    start = runner.folder / "start"
    peer = build_transformers_model(model)
    peer.save_pretrained(start, max_shard_size="400KB")
    assert len(list(start.glob("*.safetensors"))) > 1
    shutil.copy(EMBEDDED_FILE, start / "tokenizer.json")
    (start / "chat_template.jinja").write_text(TEMPLATE)
    (start / "generation_config.json").write_text('{"eos_token_id": [7], "temperature": 0.6}')
    before, expected = compute_losses(start, model)
    assert before == pytest.approx(expected, rel=1e-5)

    settings = [f"model={family}_tiny", f"model.num_layers={tiny.num_layers}"]
    done = runner.run(
        *settings, "model.init_from=start", "run.name=x", "run.steps=10", "precision=fp32"
    )
    assert done.returncode == 0, done.stderr
    do = functools.partial(call_command, export.main, runner.folder)
    exported = do("runs/x", "--output", "out", "--max-shard-size", "400KB")
    assert exported.code == 0, exported.err
    assert "WARNING" not in exported.err
    out = runner.folder / "out"
    after, expected = compute_losses(out, model)
    assert after == pytest.approx(expected, rel=1e-5)
    assert after != pytest.approx(before, rel=1e-4)
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    generation = json.loads((out / "generation_config.json").read_text())
    eos = transformers.AutoTokenizer.from_pretrained(out).eos_token
    assert eos == EMBEDDED_EOS_TOKEN
    assert generation["temperature"] == 0.6
    assert generation["eos_token_id"][1:] == [7]
