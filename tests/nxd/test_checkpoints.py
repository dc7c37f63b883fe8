"""Folders that NxD saved of AWS's own Llama, read as hlat's weights to the last bit."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hlat.checkpoint.pretrained_weights import load_pretrained, validate_pretrained
from hlat.checkpoint.tensor_chunk import TensorChunk
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.model.canonical_views import iter_canonical_views
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from tests.nxd.support.ranks import require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()

GQA = ModelConfig("gqa", 4, 64, 96, 8, 2, 128)
MORE, MHA = replace(GQA, num_key_value_heads=4), replace(GQA, num_key_value_heads=8)
FUSED, UNFUSED = {"qkv_linear": True, "fuse_qkv": True}, {"qkv_linear": True, "fuse_qkv": False}
COALESCED, SEPARATE = {"fuse_qkv": True}, {"fuse_qkv": False}
"""Ways of keeping query, key and value: NxD's GQAQKVColumnParallelLinear with one weight or three,
HLAT 7B's single layer with a stride of 3, and three layers."""


@dataclass(frozen=True)
class Run:
    """One that saves.

    Attributes:
        heads_filled: Whether keys and values are put where NxD's groups of ranks want their copies,
            because NxD's own initialisation on trn2 puts rows there.
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
        """Save the weights; returns each rank's share of the logits, where there are tokens."""
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
        given = (str(folder), settings, self._as_made(weights), tokens, self.tp, self.xser)
        return run(
            self.size,
            "aws_llama.saved",
            *given,
            mode="gloo" if tokens is None else "xla",
            NEURON_PLATFORM_TARGET_OVERRIDE=self.platform,
        )

    def _as_made(
        self, weights: dict[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Matrices in the order in which AWS's Llama makes them, norms, keys and values."""
        wholes, heads = [weights["model.embed_tokens.weight"]], []
        for layer in range(self.model.num_layers):
            prefix = f"model.layers.{layer}."
            own = {
                name.removeprefix(prefix).split(".")[1]: value
                for name, value in weights.items()
                if name.startswith(prefix) and value.dim() > 1
            }
            qkv = [self._ordered(own["q_proj"]), own["k_proj"], own["v_proj"]]
            wholes += [torch.cat(qkv)] if self.ways == COALESCED else qkv
            wholes.append(self._ordered(own["o_proj"].T).T)
            wholes += [torch.cat([own["gate_proj"], own["up_proj"]]), own["down_proj"]]
            heads.append((own["k_proj"], own["v_proj"]))
        norms = {name: value for name, value in weights.items() if value.dim() == 1}
        wholes.append(weights["lm_head.weight"])
        return wholes, norms, heads if self.heads_filled else []

    def _ordered(self, queries: Tensor) -> Tensor:
        """Query heads as ranks want them: those of the first copy of all its key/value heads, then
        those of the second; on trn1 of every rank, on trn2 of each group of ranks."""
        groups = self.tp // self.copies
        cut = queries.unflatten(
            0, (groups, self.model.num_key_value_heads // groups, self.copies, -1)
        )
        order = (2, 0, 1, 3, 4) if self.platform == "trn1" else (0, 2, 1, 3, 4)
        return cut.permute(order).flatten(0, 3)


RUNS = {
    "7B": Run(MHA, 2, 2, COALESCED),
    "70B": Run(GQA, 4, 4, UNFUSED, copies=2),
    "trn2": Run(GQA, 4, 4, FUSED, copies=2, platform="trn2", heads_filled=True, xser=False),
    "two heads a rank of trn2": Run(MORE, 4, 4, FUSED, 2, platform="trn2", heads_filled=True),
}
"""The released runs' ways at a small size, and trn2's, with logits from NxD's branches for it."""

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
            TensorChunk(
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
def test_its_logits_are_those_of_the_model_that_was_saved(tmp_path: Path, name: str) -> None:
    """Tolerance 1e-5: NxD sums over its ranks, in another order."""
    case = RUNS[name]
    weights = _weights(case.model, case.dtype)
    tokens = torch.arange(18).view(2, 9) * 7 % case.model.vocab_size
    shares = case.save(tmp_path, weights, tokens)
    llama = _read(tmp_path, case.model, case.dtype)
    assert _differing(llama, case.model, weights) == []
    with torch.no_grad():
        found, expected = llama.compute_logits(tokens), torch.cat(shares, -1)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", SAVES)
def test_every_weight_comes_back(tmp_path: Path, name: str) -> None:
    case = SAVES[name]
    weights = _weights(case.model, case.dtype)
    case.save(tmp_path, weights, None)
    assert _differing(_read(tmp_path, case.model, case.dtype), case.model, weights) == []


def test_heads_that_nxd_initialised_on_trn2_are_no_copies_and_refused(tmp_path: Path) -> None:
    case = replace(RUNS["trn2"], heads_filled=False)
    case.save(tmp_path, _weights(GQA, torch.float32), None)
    with pytest.raises(ConfigError, match="whose heads NxD itself initialised there are no copies"):
        validate_pretrained(str(tmp_path), GQA)


@pytest.mark.parametrize("ways", [["--fuse_qkv", "True"], ["--save_xser", "True"]])
def test_what_nxds_converter_makes_of_hugging_faces_weights_comes_back(
    tmp_path: Path, ways: list[str]
) -> None:
    """Its order of query heads is the one in which runs on trn1 begin from others' weights."""
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
    options = [str(word) for key, value in given.items() for word in (f"--{key}", value)]
    run(1, "checkpoint.converted", [*options, "--convert_from_full_state", *ways])
    assert _differing(_read(tmp_path / "saved", GQA, torch.float32), GQA, weights) == []
