"""hlat's engine on neuronx-distributed equals the native engine on one process."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hlat import train
from hlat.config.precision import Dtype
from hlat.config.resolve import resolve_config
from hlat.engine.engine_factory import create_engine
from hlat.model.families import hugging_face_config
from tests.distributed import checks
from tests.nxd.support.ranks import RankError, require_nxd, run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.nxd
require_nxd()

GOLDEN = Path(__file__).parent.parent / "golden"
STEPS = 4
LAYOUTS = {
    "alone": "",
    "dp2": "dp=2",
    "dp2+zero1": "dp=2 zero=1",
    "tp2": "tp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "tp4": "tp=4",
    "tp4+sp": "tp=4 sequence_parallel=true",
    "pp2": "pp=2",
    "tp2+pp2+sp": "tp=2 pp=2 sequence_parallel=true",
    "tp2+dp2+zero1": "tp=2 dp=2 zero=1",
}
"""With tp=4, each of the two key/value heads is replicated on two ranks."""
IN_XLA = ["tp2+sp", "pp2", "dp2+zero1", "tp2+pp2+sp"]


@pytest.fixture
def configure(compose):
    """Configure a small model in a layout; tp divides the vocabulary."""

    def make(layout: str | None, *overrides: str):
        """Configure the native engine on one process if `layout` is None."""
        engine, settings = ("native", []) if layout is None else ("nxd", layout.split())
        dp = 2 if "dp=2" in settings else 1
        common = [f"engine={engine}", f"batch.micro_batch_size={4 // dp}"]
        small = (*checks.MODEL, "model.vocab_size=132", "model.num_layers=4", "precision=fp32")
        layouts = (f"parallelism.{setting}" for setting in settings)
        return resolve_config(compose(*small, *common, *layouts, *overrides))

    return make


def on_ranks(config, function: str, *arguments, mode: str = "gloo", **variables: str) -> list:
    return run(
        config.num_processes, f"engine.{function}", config, *arguments, mode=mode, **variables
    )


CASES = [("gloo", name) for name in LAYOUTS] + [("xla", name) for name in IN_XLA]


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_metrics_equal_the_native_engine(configure, mode: str, name: str) -> None:
    expected = checks.train(configure(None), STEPS)
    for found in on_ranks(configure(LAYOUTS[name]), "train", STEPS, mode=mode):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("hardware", ["trn1", "trn2"])
def test_kv_head_replicas_follow_the_hardware(configure, hardware: str) -> None:
    """Replicas of a head are on strided ranks on trn1, and on adjacent ones on trn2."""
    expected = checks.train(configure(None), STEPS)
    config = configure("tp=4")
    found = on_ranks(config, "train", STEPS, NEURON_PLATFORM_TARGET_OVERRIDE=hardware)
    for rows in found:
        for one, other in zip(rows, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def get_native_state(config) -> dict[str, np.ndarray]:
    """Return weights and moments after one step on one process."""
    engine = create_engine(config)
    engine.build(config)
    engine.train_step(checks.shard_batch(checks.batches(config, 1)[0], engine), checks.RATE)
    return {
        shard.name: shard.tensor.float().numpy().reshape(shard.size).copy()
        for shard in engine.state_shards()
        if not shard.name.startswith("updates/")
    }


@pytest.mark.parametrize("name", ["tp2+sp", "tp4", "tp2+pp2+sp", "tp2+dp2+zero1"])
def test_gradients_and_updates_equal_the_native_engine(configure, name: str) -> None:
    """Compare first moments: after one step they are the clipped gradient times a factor."""
    full = get_native_state(configure(None))
    seen = dict.fromkeys(full, 0)
    for found in on_ranks(configure(LAYOUTS[name]), "slices"):
        for (tensor, offset), values in found.items():
            if tensor.startswith("updates/"):
                assert values == 1
                continue
            index = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
            scale = np.abs(full[tensor]).max()
            np.testing.assert_allclose(values, full[tensor][index], rtol=1e-4, atol=1e-4 * scale)
            seen[tensor] += values.size
    assert seen == {tensor: values.size for tensor, values in full.items()}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp2+pp2+sp", "native"),
        ("native", "tp2+pp2+sp"),
        ("tp2+dp2+zero1", "tp4"),
        ("tp4", "dp2+zero1"),
    ],
)
def test_checkpoint_loads_in_another_engine(configure, tmp_path, saved: str, loaded: str) -> None:
    """Use the nxd engine for names of LAYOUTS, and one process for native."""
    expected = checks.save_and_continue(configure(None), tmp_path / "expected", 3)

    def do(name: str, function: str, *arguments):
        if name in LAYOUTS:
            return on_ranks(configure(LAYOUTS[name]), function, *arguments)[0]
        return getattr(checks, function)(configure(None), *arguments)

    first = do(saved, "save_and_continue", tmp_path, 3)
    second = do(loaded, "load_and_continue", tmp_path / "step_00000003", 3)
    for one, other, native in zip(first, second, expected, strict=True):
        np.testing.assert_allclose(one, native, rtol=1e-6)
        np.testing.assert_allclose(other, native, rtol=1e-6)


@pytest.mark.parametrize("hardware", ["trn1", "trn2"])
def test_rank_order_follows_the_hardware(configure, hardware: str) -> None:
    """Expect strided tensor-parallel ranks on trn1: every second of eight."""
    expected = checks.train(configure(None), 2)
    config = configure("tp=4 dp=2 zero=1")
    variables = {"NEURON_PLATFORM_TARGET_OVERRIDE": hardware, "LOCAL_WORLD_SIZE": "8"}
    found = on_ranks(config, "train_with_groups", 2, **variables)
    for rows, _ in found:
        for one, other in zip(rows, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    _, axes = found[3]
    assert axes["tp"] == ([1, 3, 5, 7] if hardware == "trn1" else [0, 1, 2, 3])
    assert axes["dp"] == ([2, 3] if hardware == "trn1" else [3, 7])


def test_reject_kv_heads_shared_across_replicas(configure) -> None:
    """NxD's groups of head replicas assume adjacent tensor-parallel ranks."""
    variables = {"RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "16"}
    with pytest.raises(RankError, match=r"over ranks \[1, 3\], and .*\[1, 5, 9, 13\]"):
        run(
            *(1, "engine.build_one_rank", configure("tp=4 dp=4", "batch.micro_batch_size=1")),
            NEURON_PLATFORM_TARGET_OVERRIDE="trn1",
            **variables,
        )


@pytest.mark.parametrize("name", ["dp2", "tp4+sp"])
def test_replicas_stay_identical(configure, name: str) -> None:
    assert (
        on_ranks(configure(LAYOUTS[name]), "replica_mismatches", 3)
        == [[]] * configure(LAYOUTS[name]).num_processes
    )


def test_state_is_copied_only_to_compare_and_save(configure, tmp_path) -> None:
    """Copy nothing before the first step, and cache only tensors that the rank saves."""
    main, other = on_ranks(configure(LAYOUTS["dp2"]), "count_copied_tensors", tmp_path)
    num_params = main[0][1]
    num_copied = 3 * num_params
    assert main == [(0, num_params), (num_copied, num_params), (0, num_params)]
    assert other == [(0, num_params), (num_copied, 0), (0, 0)]


@pytest.mark.parametrize("name", ["alone", "tp2+sp", "dp2+zero1"])
def test_graphs_are_compiled_in_the_first_two_steps(configure, name: str) -> None:
    """Compile no graph after a replica comparison, and run no operator on the host in a step."""
    for counts in on_ranks(configure(LAYOUTS[name]), "compilations", 20, mode="xla"):
        graphs, on_host = zip(*counts, strict=True)
        assert graphs[1] > 0
        assert graphs[-1] == graphs[1]
        assert [*on_host] == [0] * 20 + [1]


@pytest.mark.parametrize("mode", ["gloo", "xla"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_activation_checkpointing_changes_no_result(configure, mode: str, recompute: str) -> None:
    expected = checks.train(configure(None), 2)
    checkpointing = f"parallelism.activation_checkpointing={recompute}"
    for found in on_ranks(configure("tp=2 pp=2", checkpointing), "train", 2, mode=mode):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_loss_mask_applies_on_every_rank(configure) -> None:
    """Ranks have different numbers of target tokens, so the mean of means is not the mean."""
    masked = "data.loss_mask=true"
    expected = checks.train(configure(None, masked), 2)
    assert expected != checks.train(configure(None), 2)
    for found in on_ranks(configure("dp=2 zero=1", masked), "train", 2):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


RECIPES = {
    "fp32": ["float32"] * 4,
    "bf16": ["bfloat16"] * 4,
    "mixed": ["bfloat16", "float32", "float32", "float32"],
}
"""Dtypes of the model weight, the updated parameter, the first moment and the gradient."""


@pytest.mark.parametrize("mode", ["gloo", "xla"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dtypes_of_a_recipe(configure, mode: str, recipe: str) -> None:
    precision = f"precision={recipe}"
    tolerance = 1e-6 if recipe == "fp32" else 1e-2
    expected = checks.train(configure(None, precision), 2)
    config = configure("dp=2 zero=1", precision)
    for found, dtypes in on_ranks(config, "train_with_dtypes", 2, mode=mode):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance)
        assert dtypes == [f"torch.{dtype}" for dtype in RECIPES[recipe]]


def test_dtypes_with_xla_downcast_bf16(configure) -> None:
    """With XLA_DOWNCAST_BF16, torch's float32 is bf16 on the device, and its float64 is fp32."""
    expected = checks.train(configure(None, "precision=mixed"), 2)
    config = configure("dp=2 zero=1", "precision=mixed", "compiler=neuron_2_20")
    for found, dtypes in on_ranks(
        config, "train_with_dtypes", 2, mode="xla", XLA_DOWNCAST_BF16="1"
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-2)
        assert dtypes == ["torch.float32", "torch.float64", "torch.float64", "torch.float64"]


def test_reject_stochastic_rounding_on_a_cpu(configure) -> None:
    config = configure("", "precision=bf16_sr", "compiler=neuron_2_28")
    with pytest.raises(RankError, match="device cpu with precision"):
        on_ranks(config, "train", 1)


@pytest.mark.parametrize(
    ("mode", "layout"), [("gloo", "tp=4"), ("gloo", "tp=2 dp=2 zero=1"), ("xla", "tp=2")]
)
def test_broadcast_makes_replicas_identical(configure, mode, layout) -> None:
    """Change the state of each rank; the broadcast restores that of the first replica."""
    for before, after in on_ranks(configure(layout), "synchronize_replicas", mode=mode):
        assert before
        assert after == []


@pytest.mark.parametrize("mode", ["gloo", "xla"])
def test_device_checks_cover_devices_and_links(configure, mode: str) -> None:
    found = on_ranks(configure("tp=2 dp=2"), "device_report", mode=mode)
    for rank, examination in enumerate(found):
        assert examination.num_products > 1
        assert examination.num_wrong == 0
        links = {link.axis: link for link in examination.links}
        assert links.keys() == {"tp", "dp"}
        assert rank in links["tp"].ranks
        assert all(link.num_wrong == 0 and link.bytes_per_s > 0 for link in links.values())


def test_loss_equals_transformers(configure) -> None:
    """Compare the loss on weights that a layout has trained."""
    config = configure("tp=2 pp=2 sequence_parallel=true")
    found = on_ranks(config, "slices_and_loss")
    weights = [
        {key: values for key, values in slices.items() if key[0].startswith("weights/")}
        for slices, _ in found
    ]
    settings = hugging_face_config.build_hf_config(config.model, 32, checks.EOS, Dtype.fp32)
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    states = {
        name.removeprefix("weights/"): torch.from_numpy(values)
        for name, values in checks.joined(weights).items()
    }
    peer.load_state_dict(states)
    batch = torch.from_numpy(checks.batches(config, 1)[0]).long()
    with torch.no_grad():
        expected = peer(batch, labels=batch).loss.item()
    for _, loss in found:
        assert loss == pytest.approx(expected, rel=1e-6)


def test_reject_decoding(configure) -> None:
    (errors,) = on_ranks(configure(""), "decoding_errors")
    assert len(errors) == 2
    assert all(
        "decoding is not supported" in message and "engine=native" in message for message in errors
    )


@pytest.mark.parametrize(("rank", "first", "last"), [(0, 1, 0), (100, 0, 0), (255, 0, 1)])
def test_build_one_rank_of_the_papers_70b(compose, rank: int, first: int, last: int) -> None:
    config = resolve_config(compose("experiment=hlat_70b", "hardware.nodes=8"))
    assert config.num_processes == 256
    variables = {"RANK": str(rank), "WORLD_SIZE": "256", "LOCAL_WORLD_SIZE": "32"}
    (params,) = run(1, "engine.build_one_rank", config, **variables)
    assert len(params) == 10 * 8 + first + 2 * last
    layer = 8192 * (256 + 2 * 128) + 8192 * 256 + 3 * 8192 * 896 + 2 * 8192
    ends = first * 1000 * 8192 + last * (1000 * 8192 + 8192)
    assert sum(num_bytes for _, num_bytes in params.values()) == 2 * (10 * layer + ends)
    layers = sorted({int(name.split(".")[1]) for name in params if name.startswith("layers.")})
    assert layers == [*range(rank // 32 * 10, rank // 32 * 10 + 10)]
    assert params[f"layers.{layers[0]}.self_attn.qkv_proj.weight_k"] == (
        (128, 8192),
        2 * 128 * 8192,
    )


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("gloo", "tp=2 pp=2 sequence_parallel=true"),
        ("gloo", "dp=2 zero=1"),
        ("xla", "tp=2 sequence_parallel=true"),
    ],
)
def test_recorded_losses_across_two_engines(
    compose, small, tmp_path, mode: str, layout: str
) -> None:
    """Train ten steps on a layout, and ten on the native engine in one process."""
    run_folder = (f"run.root={tmp_path}", "run.name=x", "checkpoint.every_steps=10")
    run_folder += ("optimizer.lr=3e-3",)  # of the recorded losses
    overrides = [f"parallelism.{setting}" for setting in layout.split()]
    composed = compose(*small, *run_folder, "engine=nxd", "run.steps=10", *overrides)
    config = resolve_config(composed)
    codes = on_ranks(config, "run_worker", OmegaConf.to_yaml(composed), mode=mode)
    assert codes == [0] * config.num_processes
    alone = compose(*small, *run_folder)
    train.run_worker(resolve_config(alone), OmegaConf.to_yaml(alone), [])
    rows = [json.loads(row) for row in (tmp_path / "x/metrics.jsonl").read_text().splitlines()]
    recorded = json.loads((GOLDEN / "loss_20_steps.json").read_text())
    assert [row["loss"] for row in rows] == pytest.approx(recorded, rel=1e-5)
