"""Checkpoints of AWS's Llama saved by NxD load as bit-identical weights of hlat."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hlat.checkpoint.hugging_face.pretrained_weights import load_pretrained, validate_pretrained
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from tests.nxd.support.ranks import require_nxd, run
from tests.support.canonical_parameters import iter_canonical_views

pytestmark = pytest.mark.nxd
require_nxd()

GQA = ModelConfig("gqa", 4, 64, 96, 8, 2, 128)
MORE, MHA = replace(GQA, num_key_value_heads=4), replace(GQA, num_key_value_heads=8)
FUSED, UNFUSED = {"qkv_linear": True, "fuse_qkv": True}, {"qkv_linear": True, "fuse_qkv": False}
COALESCED, SEPARATE = {"fuse_qkv": True}, {"fuse_qkv": False}
"""Layers of query, key and value: NxD's GQAQKVColumnParallelLinear with one weight or three,
HLAT 7B's single layer with a stride of 3, and three layers."""


@dataclass(frozen=True)
class Run:
    """Run that saves a checkpoint.

    Attributes:
        heads_filled: Fill the key/value replicas of NxD's rank groups, because NxD's
            initialization on trn2 repeats rows.
    """

    model: ModelConfig
    size: int
    tp: int
    ways: dict[str, bool]
    copies: int = 1
    platform: str = "trn1"
    heads_filled: bool = False
    xser: bool = True
    dtype: torch.dtype = torch.float32

    def save(self, folder: Path, weights: dict[str, Tensor], tokens: Tensor | None) -> list[Tensor]:
        """Save the weights; return the logits shard of each rank if tokens are given."""
        model = self.model
        settings = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "rms_norm_eps": model.rms_norm_eps,
            "kv_shared_group_size": self.copies,
            **self.ways,
        }
        given = (
            str(folder),
            settings,
            self._in_creation_order(weights),
            tokens,
            self.tp,
            self.xser,
        )
        return run(
            self.size,
            "aws_llama.saved",
            *given,
            mode="gloo" if tokens is None else "xla",
            NEURON_PLATFORM_TARGET_OVERRIDE=self.platform,
        )

    def _in_creation_order(
        self, weights: dict[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Return matrices in the creation order of AWS's Llama, norms, keys and values."""
        full_tensors, heads = [weights["model.embed_tokens.weight"]], []
        for layer in range(self.model.num_layers):
            prefix = f"model.layers.{layer}."
            local = {
                name.removeprefix(prefix).split(".")[1]: value
                for name, value in weights.items()
                if name.startswith(prefix) and value.dim() > 1
            }
            qkv = [self._ordered(local["q_proj"]), local["k_proj"], local["v_proj"]]
            full_tensors += [torch.cat(qkv)] if self.ways == COALESCED else qkv
            full_tensors.append(self._ordered(local["o_proj"].T).T)
            full_tensors += [torch.cat([local["gate_proj"], local["up_proj"]]), local["down_proj"]]
            heads.append((local["k_proj"], local["v_proj"]))
        norms = {name: value for name, value in weights.items() if value.dim() == 1}
        full_tensors.append(weights["lm_head.weight"])
        return full_tensors, norms, heads if self.heads_filled else []

    def _ordered(self, queries: Tensor) -> Tensor:
        """Order query heads by replica of their key/value heads, within a rank on trn1 and within a
        group of ranks on trn2."""
        groups = self.tp // self.copies
        unflattened = queries.unflatten(
            0, (groups, self.model.num_key_value_heads // groups, self.copies, -1)
        )
        order = (2, 0, 1, 3, 4) if self.platform == "trn1" else (0, 2, 1, 3, 4)
        return unflattened.permute(order).flatten(0, 3)


RUNS = {
    "7B": Run(MHA, 2, 2, COALESCED),
    "70B": Run(GQA, 4, 4, UNFUSED, copies=2),
    "trn2": Run(GQA, 4, 4, FUSED, copies=2, platform="trn2", heads_filled=True, xser=False),
    "two heads a rank of trn2": Run(MORE, 4, 4, FUSED, 2, platform="trn2", heads_filled=True),
}
"""Layers of the released runs and of trn2 at a small size, with logits from NxD's code for XLA."""

SAVES = {
    "tp2": Run(GQA, 2, 2, FUSED, xser=False, dtype=torch.bfloat16),
    "tp2 pp2": Run(GQA, 4, 2, UNFUSED, dtype=torch.bfloat16),
    "pp2": Run(GQA, 2, 1, SEPARATE, xser=False),
    "all copies": Run(GQA, 4, 4, FUSED, copies=4),
    "two heads a rank": Run(MORE, 4, 4, UNFUSED, 2, xser=False),
}


def _weights(model: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {
        p.name: torch.randn(p.shape, generator=generator) / 8 for p in list_parameter_specs(model)
    }
    return {n: (value if value.dim() > 1 else 1 + value).to(dtype) for n, value in values.items()}


def _read(folder: Path, model: ModelConfig, dtype: torch.dtype) -> Decoder:
    llama = Decoder(model).to(dtype)
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(model)}
    load_pretrained(
        str(folder),
        model,
        [
            StateShard(
                f"weights/{name}", shapes[name], (0,) * len(shapes[name]), shapes[name], view
            )
            for name, view in iter_canonical_views(model, dict(llama.named_parameters()))
        ],
    )
    return llama


def _differing(llama: Decoder, model: ModelConfig, weights: dict[str, Tensor]) -> list[str]:
    views = iter_canonical_views(model, dict(llama.named_parameters()))
    return [n for n, view in views if not torch.equal(view.reshape(weights[n].shape), weights[n])]


@pytest.mark.parametrize("name", RUNS)
def test_logits_equal_the_saved_model(tmp_path: Path, name: str) -> None:
    """Tolerance 1e-5: NxD's ranks sum in another order."""
    case = RUNS[name]
    weights = _weights(case.model, case.dtype)
    tokens = torch.arange(18).view(2, 9) * 7 % case.model.vocab_size
    logits = case.save(tmp_path, weights, tokens)
    llama = _read(tmp_path, case.model, case.dtype)
    assert _differing(llama, case.model, weights) == []
    with torch.no_grad():
        found, expected = llama.compute_logits(tokens), torch.cat(logits, -1)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", SAVES)
def test_weights_are_bit_identical(tmp_path: Path, name: str) -> None:
    case = SAVES[name]
    weights = _weights(case.model, case.dtype)
    case.save(tmp_path, weights, None)
    assert _differing(_read(tmp_path, case.model, case.dtype), case.model, weights) == []


def test_reject_kv_heads_initialised_by_nxd_on_trn2(tmp_path: Path) -> None:
    case = replace(RUNS["trn2"], heads_filled=False)
    case.save(tmp_path, _weights(GQA, torch.float32), None)
    with pytest.raises(ConfigError, match="whose heads NxD itself initialised there are no copies"):
        validate_pretrained(str(tmp_path), GQA)


@pytest.mark.parametrize("ways", [["--fuse_qkv", "True"], ["--save_xser", "True"]])
def test_weights_of_nxds_converter_are_bit_identical(tmp_path: Path, ways: list[str]) -> None:
    """The converter orders query heads as runs on trn1 do that start from converted weights."""
    weights = _weights(GQA, torch.float32)
    torch.save(weights, tmp_path / "full.pt")
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
    (tmp_path / "shape.json").write_text(json.dumps(shape | {"num_key_value_heads": 2}))
    given = {
        "input_dir": tmp_path / "full.pt",
        "output_dir": tmp_path / "saved",
        "config": tmp_path / "shape.json",
        "hw_backend": "trn1",
        "tp_size": 4,
        "pp_size": 2,
        "n_layers": 4,
        "kv_size_multiplier": 2,
        "qkv_linear": True,
    }
    options = [str(argument) for key, value in given.items() for argument in (f"--{key}", value)]
    run(1, "checkpoint.converted", [*options, "--convert_from_full_state", *ways])
    assert _differing(_read(tmp_path / "saved", GQA, torch.float32), GQA, weights) == []
