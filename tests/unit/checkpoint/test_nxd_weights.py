"""NxD checkpoints written by torch.save: read bit-exactly, or rejected with the file's name.

tests/nxd/test_checkpoints.py reads checkpoints that NxD saved.
"""

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hlat.checkpoint.hugging_face.pretrained_weights import (
    find_weights_dir,
    load_pretrained,
    validate_pretrained,
)
from hlat.config.config_errors import ConfigError
from hlat.config.model import InitCopies, ModelConfig
from hlat.distributed.state_shard import StateShard
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.mlp_spec import MoEConfig
from tests.support.canonical_parameters import iter_canonical_views

GQA = ModelConfig("gqa", 3, 64, 96, 8, 2, 128)
MHA = replace(GQA, num_key_value_heads=8)
TIED = replace(GQA, tie_embeddings=True)
FIRST = "dp_rank_00_tp_rank_00_pp_rank_00.pt"
SECOND = "dp_rank_00_tp_rank_01_pp_rank_00.pt"
KEY = "model.layers.0.self_attn.qkv_proj.weight_k"


class TensorReference:
    """Substitute for the class of torch_xla, pickled under the name of that class."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


TensorReference.__module__ = "torch_xla.utils.serialization"


@pytest.fixture(autouse=True)
def _torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the modules in which pickle looks up the class during a save."""
    module = ModuleType("torch_xla.utils.serialization")
    module.TensorReference = TensorReference
    for name in ("torch_xla", "torch_xla.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@dataclass(frozen=True)
class Sharding:
    """Sharding and file format of a model."""

    model: ModelConfig
    tp: int = 2
    pp: int = 1
    copies: int = 1
    side_by_side: bool = False
    qkv: str = "three"
    dtype: torch.dtype = torch.float32
    xser: bool = False

    def save(self, weights: dict[str, Tensor], folder: Path) -> Path:
        """Write a complete tag and return its directory."""
        (folder / "step_3/model").mkdir(parents=True)
        for stage in range(self.pp):
            for rank in range(self.tp):
                name = f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
                state = OrderedDict(self._state(weights, stage, rank))
                write(folder / "step_3/model" / name, state, self.xser)
        (folder / "step_3/checkpoint").write_text("1")
        (folder / "step_3/done").write_text("1")
        return folder / "step_3"

    def _state(self, weights: dict[str, Tensor], stage: int, rank: int) -> dict[str, Tensor]:
        state = {}
        for name, value in weights.items():
            layer = int(name.split(".")[2]) if ".layers." in name else None
            if layer is None:
                its_stage = 0 if "embed" in name else self.pp - 1
            else:
                its_stage = layer * self.pp // self.model.num_layers
            if its_stage == stage:
                axis = 1 if "o_proj" in name or "down_proj" in name else 0
                full = self._heads(name, value)
                state[name] = value if value.dim() == 1 else full.chunk(self.tp, axis)[rank]
        return {key: value.to(self.dtype).clone() for key, value in self._joined(state).items()}

    def _heads(self, name: str, value: Tensor) -> Tensor:
        if "k_proj" in name or "v_proj" in name:
            heads = value.unflatten(0, (self.model.num_key_value_heads, -1))
            if self.side_by_side:
                return heads.repeat_interleave(self.copies, 0).flatten(0, 1)
            return heads.repeat(self.copies, 1, 1).flatten(0, 1)
        if "q_proj" in name and not self.side_by_side:
            heads = value.unflatten(0, (self.model.num_key_value_heads, self.copies, -1))
            return heads.transpose(0, 1).flatten(0, 2)
        if "o_proj" in name:
            return self._heads("q_proj", value.T).T
        return value

    def _joined(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, value in state.items():
            stem, _, last = name.removesuffix(".weight").rpartition(".")
            joined = f"{stem}.qkv_proj.weight"
            if last == "gate_proj":
                up = state[f"{stem}.up_proj.weight"]
                found[f"{stem}.gate_up_proj.weight"] = torch.cat([value, up])
            elif last in ("q_proj", "k_proj", "v_proj") and self.qkv == "three":
                found[f"{joined}_{last[0]}"] = value
            elif last == "q_proj" and self.qkv in ("_qkv", ""):
                others = [state[f"{stem}.{which}_proj.weight"] for which in "kv"]
                found[f"{joined}{self.qkv}"] = torch.cat([value, *others])
            elif last != "up_proj" and (last not in ("k_proj", "v_proj") or self.qkv == "separate"):
                found[name] = value
        return found


SHARDINGS = {
    "7B": Sharding(MHA, 2, qkv=""),
    "70B": Sharding(GQA, 4, 3, 2, xser=True),
    "trn2": Sharding(GQA, 4, 2, 2, True, "_qkv", torch.bfloat16, xser=True),
    "one rank": Sharding(GQA, 1, qkv="separate"),
    "a copy on each rank": Sharding(GQA, 8, copies=4, qkv="_qkv"),
    "all on all ranks": Sharding(GQA, 4, copies=4),
    "several heads a rank": Sharding(MHA, 2, 3, qkv="separate", dtype=torch.bfloat16),
    "tied": Sharding(TIED, 2, 3),
}


def write(file: Path, state: dict[str, Any], xser: bool) -> None:
    """Write a rank file as NxD does; with `xser`, each tensor has a file."""
    if not xser:
        torch.save(state, file)
        return
    folder = Path(f"{file}.tensors")
    folder.mkdir()
    message = {}
    for tid, value in enumerate(state.values()):
        torch.save(value, folder / f"tensor_{tid}.pt")
        message[tid] = {"dtype": value.dtype, "shape": value.shape, "expert_model_parallel": False}
    torch.save({key: TensorReference(tid) for tid, key in enumerate(state)}, file)
    torch.save(message, f"{file}.info.pt")


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {
        p.name: torch.randn(p.shape, generator=generator) / 8 for p in list_parameter_specs(model)
    }
    return {n: value if value.dim() > 1 else 1 + value for n, value in values.items()}


def read(folder: Path, model: ModelConfig) -> Decoder:
    llama = Decoder(model)
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(model)}
    views = iter_canonical_views(model, dict(llama.named_parameters()))
    shards = [
        StateShard(f"weights/{name}", shapes[name], (0,) * len(shapes[name]), shapes[name], view)
        for name, view in views
    ]
    load_pretrained(str(folder), model, shards)
    return llama


def values_of(llama: Decoder, model: ModelConfig) -> dict[str, Tensor]:
    shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(model)}
    views = iter_canonical_views(model, dict(llama.named_parameters()))
    return {name: view.detach().reshape(shapes[name]) for name, view in views}


def find_problems(
    folder: Path, model: ModelConfig = GQA, read: Callable[..., object] = validate_pretrained
) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read(str(folder), model)
    prefix = f"model.init_from={folder}: "
    assert all(problem.startswith(prefix) for problem in refused.value.problems)
    return [problem.removeprefix(prefix) for problem in refused.value.problems]


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    """Return a tag that two ranks saved."""
    return Sharding(GQA).save(weights_of(GQA), tmp_path / "run")


@pytest.fixture
def xser_tag(tmp_path: Path) -> Path:
    """Return a tag with a file for each tensor."""
    return Sharding(GQA, xser=True).save(weights_of(GQA), tmp_path / "run")


def change_state(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state in a file."""
    state = dict(torch.load(file, weights_only=True))
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize("name", SHARDINGS)
def test_every_weight_is_read_bit_exactly(tmp_path: Path, name: str) -> None:
    sharding = SHARDINGS[name]
    weights = weights_of(sharding.model)
    sharding.save(weights, tmp_path)
    found = values_of(read(tmp_path, sharding.model), sharding.model)
    assert [
        n for n in found if not torch.equal(found[n], weights[n].to(sharding.dtype).float())
    ] == []


def test_only_a_slice_across_ranks_is_read(tmp_path: Path) -> None:
    sharding, name = SHARDINGS["70B"], "model.layers.1.self_attn.o_proj.weight"
    weights = weights_of(GQA)
    sharding.save(weights, tmp_path)
    part, moment = torch.zeros(3, 20), torch.zeros(64, 64)
    load_pretrained(
        str(tmp_path),
        GQA,
        [
            StateShard(f"weights/{name}", (64, 64), (5, 30), (3, 20), part),
            StateShard(f"exp_avg/{name}", (64, 64), (0, 0), (64, 64), moment),
        ],
    )
    assert torch.equal(part, weights[name][5:8, 30:50])
    assert not moment.any()


@pytest.mark.parametrize("name", ["7B", "70B"])
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sharding = SHARDINGS[name]
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=sharding.model.num_key_value_heads,
        rms_norm_eps=sharding.model.rms_norm_eps,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(weights_of(sharding.model))
    sharding.save(theirs.state_dict(), tmp_path)
    tokens = torch.arange(34).view(2, 17) * 5 % 128
    with torch.no_grad():
        found, expected = (
            read(tmp_path, sharding.model).compute_logits(tokens),
            theirs(tokens).logits,
        )
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_experts_are_copies_of_the_dense_network(tmp_path: Path) -> None:
    sharding = SHARDINGS["70B"]
    weights = weights_of(GQA)
    sharding.save(weights, tmp_path)
    moe = MoEConfig(num_experts=4, intermediate_size=48)
    model = replace(GQA, mlp=replace(GQA.mlp, kind="moe", moe=moe))
    with pytest.raises(
        ConfigError, match=r"it is a dense model, and this run has model\.mlp\.kind"
    ):
        validate_pretrained(str(tmp_path), model)
    moe.upcycling_noise = 0.0
    validate_pretrained(str(tmp_path), model)
    found, prefix = values_of(read(tmp_path, model), model), "model.layers.2.mlp"
    up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("up", "down"))
    assert torch.equal(found[f"{prefix}.experts.3.up_proj.weight"], up[48:].to(sharding.dtype))
    assert torch.equal(
        found[f"{prefix}.experts.2.down_proj.weight"], 2 * down[:, :48].to(sharding.dtype).float()
    )


def test_the_fingerprint_equals_that_of_a_hugging_face_directory(tmp_path: Path) -> None:
    weights = weights_of(GQA)
    Sharding(GQA, 4, 3, 2, xser=True).save(weights, tmp_path / "nxd")
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 128,'
        '"intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,'
        '"rms_norm_eps": 1e-5}'
    )
    assert load_pretrained(str(tmp_path / "nxd"), GQA, []) == load_pretrained(
        str(tmp_path / "hf"), GQA, []
    )


def test_buffers_and_the_head_of_a_tied_model_are_skipped(tag: Path) -> None:
    before = [load_pretrained(str(tag), model, []) for model in (GQA, TIED)]
    change_state(
        tag / "model" / FIRST,
        lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    validate_pretrained(str(tag), GQA)
    validate_pretrained(str(tag), TIED)
    assert [load_pretrained(str(tag), model, []) for model in (GQA, TIED)] == before


def test_the_path_may_be_a_run_a_tag_or_its_model(tag: Path) -> None:
    for folder in (tag, tag / "model", tag.parent):
        validate_pretrained(str(folder), GQA)
        assert find_weights_dir(str(folder)) == str(tag / "model")


def test_the_newest_complete_tag_is_used(tag: Path) -> None:
    weights = {name: value + 1 for name, value in weights_of(GQA).items()}
    newest = Sharding(GQA).save(weights, tag.parents[1] / "other").rename(tag.parent / "step_10")
    begun = (
        Sharding(GQA)
        .save(weights_of(GQA), tag.parents[1] / "another")
        .rename(tag.parent / "step_20")
    )
    (begun / "done").unlink()
    os.utime(tag / "done", (1, 1))
    found = values_of(read(tag.parent, GQA), GQA)
    assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"])

    os.utime(newest / "done", (0, 0))
    assert find_problems(tag.parent) == [
        "its tag step_10 has the highest number, step_3 was written last; specify one: "
        f"model.init_from={newest} or model.init_from={tag}"
    ]
    (tag / "done").unlink()
    (newest / "done").unlink()
    assert find_problems(tag.parent) == [
        "none of its tags has done, so NxD had finished none; specify one: "
        f"model.init_from={newest} or model.init_from={begun} or model.init_from={tag}"
    ]
    assert find_problems(tag) == [
        "it has checkpoint but no done, so NxD had not finished it; if the save was asynchronous and "
        f"finished just before the run ended: touch {tag / 'done'}"
    ]
    (tag / "checkpoint").unlink()  # NxD's converter writes no such file
    validate_pretrained(str(tag), GQA)


def test_missing_rank_files(tmp_path: Path) -> None:
    tag = SHARDINGS["70B"].save(weights_of(GQA), tmp_path)
    (tag / "model/dp_rank_00_tp_rank_02_pp_rank_01.pt").unlink()
    assert find_problems(tag) == [
        "it has files of 4 tensor-parallel ranks in 3 pipeline stages, but no "
        "dp_rank_00_tp_rank_02_pp_rank_01.pt"
    ]
    for rank in range(4):
        (tag / f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_01.pt").unlink(missing_ok=True)
        (tag / f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_02.pt").unlink()
    assert find_problems(tag)[::5] == [
        "it lacks model.layers.1.input_layernorm.weight",
        "and 15 more of the kind",
    ]


def test_a_mixture_of_experts_is_rejected(tag: Path) -> None:
    name = "dp_rank_00_ep_rank_00_tp_rank_00_pp_rank_00.pt"
    (tag / "model" / FIRST).rename(tag / "model" / name)
    assert find_problems(tag) == [
        f"{name} is not a rank file of a dense model, such as dp_rank_00_tp_rank_00_pp_rank_00.pt"
    ]


def test_missing_misshapen_and_unknown_tensors_are_rejected(tag: Path) -> None:
    file = tag / "model" / SECOND
    good = file.read_bytes()
    name = "model.layers.1.mlp.down_proj.weight"

    change_state(file, lambda state: state.pop(name))
    assert find_problems(tag) == [f"{SECOND} lacks {name}, which {FIRST} has"]

    file.write_bytes(good)
    change_state(file, lambda state: state.update({name: state[name][:, 1:]}))
    assert find_problems(tag) == [
        f"{SECOND} has {name} of shape [64, 47], this run's model sharded over 2 ranks [64, 48]"
    ]

    file.write_bytes(good)
    change_state(file, lambda state: state.update({name: state[name].to(torch.int8)}))
    assert find_problems(tag) == [f"{SECOND} has {name} in I8; hlat reads F32, BF16, F16"]

    file.write_bytes(good)
    change_state(file, lambda state: state.update({name: state[name].bfloat16()}))
    assert find_problems(tag) == [f"{SECOND} has {name} in BF16, {FIRST} F32"]

    file.write_bytes(good)
    change_state(file, lambda state: state.update({name: 1}))
    assert find_problems(tag) == [f"{SECOND} contains {name} as int, not as a tensor"]

    file.write_bytes(good)
    megatron = "language_model.embedding.word_embeddings.weight"
    for each in (file, tag / "model" / FIRST):
        change_state(each, lambda state: state.update({megatron: torch.ones(2)}))
    assert find_problems(tag) == [
        f"{FIRST} has {megatron}, which this model lacks; it is a Megatron model of NxDT, which its "
        "checkpoint_converter.py writes as a Llama"
    ]


def test_another_model_is_rejected_with_both_shapes(tag: Path) -> None:
    assert find_problems(tag, replace(GQA, vocab_size=256)) == [
        f"{file} has {name} of shape [64, 64], this run's model sharded over 2 ranks [128, 64]"
        for file in (FIRST, SECOND)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    assert find_problems(tag, replace(GQA, num_layers=2))[0] == (
        f"{FIRST} has model.layers.2.input_layernorm.weight, which this model lacks"
    )
    assert find_problems(tag, replace(GQA, num_layers=4))[0] == (
        "it lacks model.layers.3.input_layernorm.weight"
    )
    assert find_problems(tag, replace(GQA, num_key_value_heads=4)) == [
        f"{FIRST} has {KEY} of shape [8, 64], which is not a shard for 2 ranks of "
        "model.num_attention_heads=8 and copies of model.num_key_value_heads=4, heads of 8"
    ]


def test_config_json_of_the_tag_is_compared(tag: Path) -> None:
    (tag / "config.json").write_text('{"model_type": "llama", "rope_theta": 500000.0}')
    assert (
        "config.json has rope_theta=500000.0, this run has model.rope_theta=10000.0; set "
        "model.rope_theta=500000.0"
    ) in find_problems(tag)


@pytest.mark.parametrize("xser", [False, True])
def test_copies_that_differ(tmp_path: Path, xser: bool) -> None:
    weights = weights_of(GQA)
    tag = Sharding(GQA, 4, copies=2, xser=xser).save(weights, tmp_path)
    third = "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    norm = "model.norm.weight"
    increase_element(tag / "model" / third, KEY)
    advice = (
        "; copies drift under stochastic rounding, as in HLAT's 7B run: if this is the reason, "
        "model.init_copies=first takes the first of each"
    )
    assert find_problems(tag, read=lambda folder, model: read(folder, model)) == [
        f"{FIRST} and {third} should contain copies of model.layers.0.self_attn.k_proj.weight, and "
        f"differ by up to 0.25{advice}"
    ]
    increase_element(tag / "model" / SECOND, norm)
    lenient = replace(GQA, init_copies=InitCopies.first)
    found = values_of(read(tag, lenient), GQA)
    assert [name for name in found if not torch.equal(found[name], weights[name])] == []


def increase_element(file: Path, key: str) -> None:
    """Increase one element of a tensor by 0.25."""
    state = torch.load(file, weights_only=False)
    tensor = state[key]
    if isinstance(tensor, TensorReference):
        tensor_file = Path(f"{file}.tensors/tensor_{tensor.tid}.pt")
        value = torch.load(tensor_file, weights_only=True)
        value.view(-1)[-1] += 0.25
        torch.save(value, tensor_file)
    else:
        tensor.view(-1)[-1] += 0.25
        torch.save(state, file)


def test_unequal_heads_are_rejected(tmp_path: Path) -> None:
    weights = weights_of(GQA)
    tag = Sharding(GQA, 4, copies=2).save(weights, tmp_path)
    for rank in range(4):
        file = tag / f"model/dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        other = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
        change_state(file, lambda state, other=other: state.update({KEY: other}))
    lenient = replace(GQA, init_copies=InitCopies.first)
    for model in (GQA, lenient):
        (problem,) = find_problems(tag, model)
        assert problem.startswith(f"{KEY} contains 2 copies of each key/value head in an unknown")
        assert problem.endswith("whose heads NxD itself initialised there are no copies")


class Hostile:
    """Object that runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("target", ["rank", "tensor", "announcement"])
def test_a_file_that_refers_to_code_is_rejected(xser_tag: Path, target: str) -> None:
    file = {
        "rank": FIRST,
        "tensor": f"{SECOND}.tensors/tensor_0.pt",
        "announcement": f"{FIRST}.info.pt",
    }[target]
    proof = xser_tag / "ran"
    torch.save({"model.norm.weight": Hostile(proof)}, xser_tag / "model" / file)
    (problem,) = find_problems(xser_tag, read=lambda folder, model: read(folder, model))
    assert problem == (
        f"{file} refers to posix.mkdir, and could run code when it is loaded; it was not loaded"
    )
    assert not proof.exists()


def test_a_plain_pickle_is_rejected_and_not_run(tag: Path) -> None:
    proof = tag / "ran"
    (tag / "model" / FIRST).write_bytes(pickle.dumps(Hostile(proof)))
    (problem,) = find_problems(tag)
    assert problem.startswith(f"{FIRST} cannot be read (")
    assert not proof.exists()


@pytest.mark.parametrize("tid", ["../../secret", 1.5, None])
def test_an_invalid_tensor_reference_is_rejected(xser_tag: Path, tid: Any) -> None:
    torch.save({"model.norm.weight": TensorReference(tid)}, xser_tag / "model" / FIRST)
    assert find_problems(xser_tag) == [f"{FIRST} does not name the file of model.norm.weight"]


def test_missing_and_damaged_tensor_files_are_rejected(xser_tag: Path) -> None:
    folder = xser_tag / "model" / f"{FIRST}.tensors"
    last = folder / "tensor_2.pt"
    good = last.read_bytes()
    last.write_bytes(good[:-100])
    (problem,) = find_problems(xser_tag, read=lambda folder, model: read(folder, model))
    assert problem.startswith(f"{FIRST}.tensors/tensor_2.pt cannot be read (")

    last.unlink()
    assert find_problems(xser_tag) == [f"there is no {FIRST}.tensors/tensor_2.pt"]

    for file in folder.iterdir():
        file.unlink()
    (problem,) = find_problems(xser_tag)
    assert problem.startswith(
        f"{FIRST}.tensors contains none of the 27 tensors of {FIRST}; NxD omits"
    )


def test_a_tensor_that_differs_from_its_info_file_is_rejected(xser_tag: Path) -> None:
    tensor_file = xser_tag / "model" / f"{SECOND}.tensors/tensor_0.pt"
    torch.save(torch.ones(3), tensor_file)
    (problem,) = find_problems(xser_tag, read=lambda folder, model: read(folder, model))
    assert problem == (
        f"{SECOND} has model.embed_tokens.weight as F32 [3], its .info.pt as F32 [64, 64]"
    )


def test_info_files_are_optional(xser_tag: Path) -> None:
    before = load_pretrained(str(xser_tag), GQA, [])
    for file in (xser_tag / "model").glob("*.info.pt"):
        file.unlink()
    validate_pretrained(str(xser_tag), GQA)
    assert load_pretrained(str(xser_tag), GQA, []) == before


def test_a_truncated_file(tag: Path) -> None:
    file = tag / "model" / SECOND
    file.write_bytes(file.read_bytes()[:-100])
    (problem,) = find_problems(tag)
    assert problem.startswith(f"{SECOND} cannot be read (")


def test_file_names_are_validated_without_torch(tag: Path) -> None:
    (tag / "model" / FIRST).unlink()
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hlat.checkpoint.hugging_face.pretrained_weights import validate_pretrained\n"
        "from hlat.config.model import ModelConfig\n"
        f"validate_pretrained({str(tag)!r}, ModelConfig('gqa', 3, 64, 96, 8, 2, 128))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"but no {FIRST}" in done.stderr
