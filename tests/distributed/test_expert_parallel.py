"""Experts that ranks divide train like those of one process.

The reference has no exchange of tokens: one process applies all experts.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.engine_capabilities import validate_decoding
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.distributed.device_mesh import ParallelMesh, init_distributed
from hlat.distributed.rank_environment import read_rank_info
from hlat.engine.native.expert_parallel import apply_expert_parallel
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.families import hugging_face_config
from hlat.model.moe import MoE
from hlat.model.parameter_spec import list_local_experts
from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks
from tests.distributed.test_layouts import assert_rows_equal

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

MOE = (
    "model.mlp.kind=moe",
    "model.mlp.moe.num_experts=8",
    "model.mlp.moe.intermediate_size=48",
    "model.init_std=0.1",  # routers prefer some experts
)
LOSSES = ("model.mlp.moe.balance_loss=0.1", "model.mlp.moe.z_loss=0.01")
FIVE = ("model.mlp.moe.num_experts=5",)
GROUPS = (
    "model.mlp.moe.scoring=sigmoid",
    "model.mlp.moe.num_groups=4",
    "model.mlp.moe.groups_per_token=2",
    "model.mlp.moe.routed_scale=2.5",
    "model.mlp.moe.shared_size=32",
    "model.mlp.moe.shared_gate=true",
)
BIAS = ("model.mlp.moe.bias_update_rate=0.05", "model.mlp.moe.every=2")
MUON = ("optimizer=muon", "optimizer.muon.iteration_dtype=fp32")
ONE_PER_TOKEN = ("model.mlp.moe.experts_per_token=1", "model.mlp.moe.normalize_top_k=false")
ROUTED_TO_ALL = ("model.mlp.moe.experts_per_token=8",)
"""No rounding error selects another expert."""
OLMOE = (
    *("model.hidden_size=32", "model.intermediate_size=48", "model.mlp.moe.num_experts=8"),
    "model.mlp.moe.experts_per_token=2",
    *("model.vocab_size=99", "optimizer.grad_clip=0"),
)
STEPS = 3
SP = "tp=2 sequence_parallel=true"
slow = pytest.mark.slow

CASES = [
    pytest.param("ep=2 dp=2", LOSSES, id="ep2"),
    pytest.param("ep=2 dp=2", GROUPS, id="ep2-groups"),
    pytest.param("ep=2 dp=4", FIVE, id="ep2-dp4-five"),
    pytest.param("ep=4 dp=4", FIVE, id="ep4-five", marks=slow),
    pytest.param("ep=4 dp=4", ONE_PER_TOKEN, id="ep4-one-per-token", marks=slow),
    pytest.param("ep=2 dp=4", LOSSES, id="ep2-dp4", marks=slow),
    pytest.param("ep=2 dp=4 zero=1", LOSSES, id="zero1"),
    pytest.param("ep=2 dp=4 zero=2", LOSSES, id="zero2", marks=slow),
    pytest.param("ep=2 dp=4 zero=3", LOSSES, id="zero3"),
    pytest.param("ep=2 dp=4 zero=3 dp_replicate=2", FIVE, id="zero3-replicas"),
    pytest.param("ep=2 dp=8 zero=3 dp_replicate=2", LOSSES, id="zero3-two-replicas", marks=slow),
    pytest.param("ep=2 dp=8 zero=1 dp_replicate=2", MUON, id="zero1-replicas", marks=slow),
    pytest.param("ep=2 dp=2 zero=1", (), id="zero1-one-replica", marks=slow),
    pytest.param("ep=2 dp=2 zero=3", FIVE, id="zero3-one-replica"),
    pytest.param(f"ep=2 dp=2 {SP}", LOSSES, id="tp2-sp"),
    pytest.param("ep=2 dp=2 tp=2", LOSSES, id="tp2", marks=slow),
    pytest.param("ep=2 dp=2 pp=2", LOSSES, id="pp2"),
    pytest.param(f"ep=2 dp=2 {SP} pp=2 zero=3", GROUPS, id="tp2-sp-pp2-zero3", marks=slow),
    pytest.param("ep=2 dp=4 pp=2 zero=3", LOSSES, id="pp2-zero3", marks=slow),
    pytest.param("ep=2 dp=2 pp=2", BIAS, id="pp2-bias-dense-layers"),
    pytest.param("ep=2 dp=4 zero=1", MUON, id="muon"),
    pytest.param("ep=2 dp=4 zero=3", MUON, id="muon-zero3", marks=slow),
    pytest.param(f"ep=2 dp=2 {SP}", MUON, id="muon-tp2-sp", marks=slow),
    pytest.param(
        "ep=2 dp=2 activation_checkpointing=selective", LOSSES, id="selective", marks=slow
    ),
    pytest.param("ep=2 dp=2 activation_checkpointing=full", LOSSES, id="full"),
    pytest.param(
        "ep=2 dp=4 zero=3 activation_checkpointing=full", LOSSES, id="full-zero3", marks=slow
    ),
    pytest.param(
        "ep=2 dp=2 pp=2 pipeline_schedule=interleaved stages_per_rank=2",
        LOSSES,
        id="interleaved",
        marks=slow,
    ),
    pytest.param(
        "ep=2 dp=2 pp=2 pipeline_schedule=zero_bubble stages_per_rank=2",
        LOSSES,
        id="zero-bubble",
        marks=slow,
    ),
]


@pytest.fixture(scope="module")
def single_process(configure):
    """Return the record of one process with the layers and overrides of a layout."""

    @functools.cache
    def train(number: str, overrides: tuple[str, ...]) -> checks.TrainingRecord:
        return checks.train_and_record(configure("", number, *MOE, *overrides), STEPS)

    return lambda layout, overrides: train(layers(layout), overrides)


def assert_equal_training(
    found: list[checks.TrainingRecord], expected: checks.TrainingRecord
) -> None:
    """Compare losses, norms of gradients and weights, and each gradient of the first step.

    With AdamW the first moment after one step is the clipped gradient times 1 - beta1.
    """
    assert_rows_equal(found[0].rows, expected.rows)
    assert all(record.rows == found[0].rows for record in found)
    tensors, others = (
        checks.joined([record.shards for record in records]) for records in (found, [expected])
    )
    assert tensors.keys() == others.keys()
    for key, whole in others.items():
        if key.startswith("exp_avg/"):
            assert np.abs(tensors[key] - whole).max() <= 1e-5 * np.abs(whole).max(), key


@pytest.mark.parametrize(("layout", "overrides"), CASES)
@pytest.mark.slow_after(4)
def test_training_equals_one_process(
    ranks: Ranks, configure, single_process, layout: str, overrides: tuple[str, ...]
) -> None:
    accumulation = 2 if "dp=8" in layout else 4
    config: Config = configure(layout, *MOE, *overrides, accumulation=accumulation)
    found = ranks.run(config.num_processes, checks.train_and_record, config, STEPS)
    assert_equal_training(found, single_process(layout, overrides))


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        pytest.param("ep=2 dp=2 zero=3", "mixed", id="mixed-one-replica"),
        pytest.param("ep=2 dp=4 zero=3", "mixed", id="mixed-fsdp", marks=slow),
        pytest.param("ep=2 dp=4 zero=1", "mixed", id="mixed-zero1", marks=slow),
        pytest.param("ep=2 dp=4 zero=1", "bf16_sr", id="bf16-sr", marks=slow),
        pytest.param("ep=2 dp=2 zero=2", "bf16_sr", id="bf16-sr-one-replica", marks=slow),
    ],
)
def test_every_rank_trains_with_a_recipe(
    ranks: Ranks, configure, single_process, layout: str, recipe: str
) -> None:
    """Compare losses with one process, and the results of all ranks bit by bit."""
    overrides = (*ROUTED_TO_ALL, f"precision={recipe}")
    config = configure(layout, *MOE, *overrides)
    found = ranks.run(config.num_processes, checks.train_and_record, config, STEPS)
    assert all(record.rows == found[0].rows for record in found)
    for row, other in zip(found[0].rows, single_process(layout, overrides).rows, strict=True):
        assert row[0] == pytest.approx(other[0], rel=4e-3)


def list_experts(config: Config) -> tuple[set[str], set[str]]:
    """Return the names of experts of which this rank has weights, and state of whole matrices."""
    engine = NativeEngine()
    engine.build(config)
    names = [shard.name for shard in engine.state_shards() if ".experts." in shard.name]
    weights = {name for name in names if name.startswith("weights/")}
    matrices = {one.name for one in engine.params.iter_matrix_state_shards()}
    engine.close()
    return (
        {get_expert(name) for name in weights},
        {get_expert(name) for name in matrices if ".experts." in name},
    )


def get_expert(name: str) -> str:
    return name.partition(".experts.")[2].partition(".")[0]


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=slow)])
def test_ranks_have_some_experts_and_update_their_matrices_only(
    ranks: Ranks, configure, zero: int
) -> None:
    config = configure(f"ep=2 dp=4 zero={zero}", *MOE, *FIVE, *MUON)
    found = ranks.run(4, list_experts, config)
    blocks = [{"0", "1"}, {"2", "3", "4"}] * 2
    assert [weights for weights, _ in found] == blocks
    for (_, matrices), block in zip(found, blocks, strict=True):
        assert matrices <= block
    assert set.union(*(matrices for _, matrices in found)) == set.union(*blocks)


@dataclasses.dataclass(frozen=True)
class LayerGradients:
    """Outputs and gradients of a layer on a rank."""

    y: np.ndarray
    x_grad: np.ndarray
    router: np.ndarray
    experts: dict[int, np.ndarray]


def run_layer(config: Config, sign: int) -> LayerGradients:
    """Run a layer whose router avoids the first two of four experts for positive inputs.

    The inputs of every other rank are multiplied by `sign`.
    """
    init_distributed(read_rank_info().rank, config.num_processes, torch.device("cpu"))
    rank = read_rank_info().rank if config.num_processes > 1 else 0
    mesh = ParallelMesh(config, rank)
    layer, generator = MoE(config.model), torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    with torch.no_grad():
        layer.gate.weight[:2] -= 1
    inputs = torch.randn(4, 3, config.model.hidden_size, generator=generator).abs()
    inputs[1::2] *= sign
    local = list_local_experts(4, mesh.ep.size, mesh.ep.rank)
    for index in {*range(4)} - {*local}:
        for parameter in layer.experts[index].parameters():
            torch.nn.init.constant_(parameter, torch.nan)  # experts of other ranks
    apply_expert_parallel(layer, mesh.ep)
    x = inputs[mesh.dp.rank :: mesh.dp.size].clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    gradients = {
        index: torch.cat([p.grad.flatten() for p in layer.experts[index].parameters()]).numpy()
        for index in local
    }
    return LayerGradients(
        y.detach().numpy(), x.grad.numpy(), layer.gate.weight.grad.numpy(), gradients
    )


@pytest.mark.parametrize(
    ("sign", "num_idle"), [(1, 2), (-1, 0)], ids=["rank-without-tokens", "tokens-cross"]
)
def test_layer_with_ranks_without_tokens(ranks: Ranks, configure, sign: int, num_idle: int) -> None:
    """The experts of rank 0 have no tokens, or each rank's tokens are all for the other rank."""
    four = (*MOE, "model.mlp.moe.num_experts=4", "model.mlp.moe.experts_per_token=2")
    found = ranks.run(2, run_layer, configure("ep=2 dp=2", *four), sign)
    expected = run_layer(configure("", *four), sign)
    assert sum(not gradient.any() for gradient in expected.experts.values()) == num_idle
    for rank, record in enumerate(found):
        np.testing.assert_allclose(record.y, expected.y[rank::2], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(record.x_grad, expected.x_grad[rank::2], rtol=1e-4, atol=1e-7)
        for index, gradient in record.experts.items():
            np.testing.assert_allclose(gradient, expected.experts[index], rtol=1e-4, atol=1e-6)
    router = sum(record.router for record in found)
    np.testing.assert_allclose(router, expected.router, rtol=1e-4, atol=1e-6)


RESHARDED = ["ep=2 dp=2", "", "ep=2 dp=4 zero=3"]


@pytest.mark.parametrize("optimizer", [(), pytest.param(MUON, marks=slow)], ids=["adamw", "muon"])
@pytest.mark.slow_after(10)
def test_checkpoint_loads_with_another_number_of_ranks(
    ranks: Ranks, configure, tmp_path, optimizer: tuple[str, ...]
) -> None:
    """Each layout resumes its checkpoint bit by bit, and trains on from that of the layout before."""

    def run(layout, check, *arguments):
        config = configure(layout, *MOE, *FIVE, *optimizer)
        if config.num_processes == 1:
            return check(config, *arguments)
        return ranks.run(config.num_processes, check, config, *arguments)[0]

    path = None
    for number, layout in enumerate([*RESHARDED, RESHARDED[0]]):
        folder = tmp_path / str(number)
        expected = run(layout, checks.save_and_continue, folder, 2)
        if path is not None:
            found = run(layout, checks.load_and_continue, path, 2)
            assert_rows_equal(found, expected)
        path = folder / "step_00000002"
        assert run(layout, checks.load_and_continue, path, 2) == expected


def test_evaluation_of_fewer_sequences_than_ranks(ranks: Ranks, configure, single_process) -> None:
    """Five sequences on four ranks: some ranks evaluate padding, and take part in the exchange."""
    config = configure("ep=4 dp=4", *MOE, *FIVE)
    expected = single_process("ep=4 dp=4", FIVE).rows[-1]
    for found in ranks.run(4, checks.train, config, STEPS):
        assert found[-1] == pytest.approx(expected, rel=1e-5)


def test_decoding_is_refused(configure) -> None:
    with pytest.raises(ConfigError, match=r"decoding with parallelism.ep=2 is not supported"):
        validate_decoding(configure("ep=2 dp=2", *MOE))


def record_first_step(config: Config) -> tuple[float, dict[str, dict]]:
    """Return the loss, and initial weights and first moments after one step by kind."""
    engine = NativeEngine()
    engine.build(config)

    def collect(prefix: str) -> dict:
        return {
            (shard.name.removeprefix(prefix), shard.offset): shard.tensor.numpy()
            .reshape(shard.size)
            .copy()
            for shard in engine.state_shards()
            if shard.is_main_replica and shard.name.startswith(prefix)
        }

    weights = collect("weights/")
    loss = checks.run_step(engine, checks.batches(config, 1)[0])[0]
    moments = collect("exp_avg/")
    engine.close()
    return loss, {"weights": weights, "exp_avg": moments}


def test_loss_and_router_gradients_equal_transformers(ranks: Ranks, configure) -> None:
    """In transformers 5, the loss of two ranks was right and the gradient of the router wrong."""
    transformers = pytest.importorskip("transformers")
    config = configure("ep=2 dp=2", "model=olmoe_tiny", *OLMOE, accumulation=2)
    found = ranks.run(2, record_first_step, config)
    weights, moments = (
        checks.joined([states[kind] for _, states in found]) for kind in ("weights", "exp_avg")
    )
    settings = hugging_face_config.build_hf_config(config.model, 32, checks.EOS, Dtype.fp32)
    model = transformers.OlmoeForCausalLM(transformers.OlmoeConfig.from_dict(settings))
    load_olmoe(model, weights)
    tokens = torch.from_numpy(checks.batches(config, 1)[0]).long()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert [one for one, _ in found] == pytest.approx([loss.item()] * 2, rel=1e-6)
    beta1 = config.optimizer.beta1
    for number, layer in enumerate(model.model.layers):
        name = f"model.layers.{number}.mlp.gate.weight"
        gradient, exact = moments[name] / (1 - beta1), layer.mlp.gate.weight.grad.numpy()
        assert np.abs(gradient - exact).max() <= 1e-5 * np.abs(exact).max()
        assert np.abs(exact).max() > 0


def load_olmoe(model: torch.nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Load canonical weights; the experts of a layer are 3-D tensors in transformers 5."""
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    for name, target in model.state_dict().items():
        path, _, projection = name.rpartition(".experts.")
        if not path or projection not in ("gate_up_proj", "down_proj"):
            continue
        experts = [f"{path}.experts.{index}" for index in range(len(target))]
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        joint = [
            torch.cat([state.pop(f"{expert}.{part}.weight") for part in parts])
            for expert in experts
        ]
        state[name] = torch.stack(joint)
    model.load_state_dict(state)
