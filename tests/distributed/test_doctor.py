"""The doctor finds each injected bug and names the faulty part, and finds nothing in a correct run."""

import json

import pytest

from hlat.config.config_errors import ExitCode
from hlat.config.package_dirs import list_choices
from hlat.config.resolve import resolve_config
from hlat.doctor.check_result import CheckStatus
from hlat.doctor.check_runner import CHECKS
from hlat.doctor.reduced_config import reduce_config
from tests.distributed import mutants, training_mutants
from tests.distributed.layout_overrides import DP, EP, EP_DP, HSDP, KV, MICRO, PP, SP, TP
from tests.distributed.mutants import FOUND
from tests.distributed.ranks import Ranks
from tests.support.model_components import COMPONENTS

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

ARITHMETIC = [name for name in CHECKS if name != "data"]
"""Checks that start no processes."""

OF_GRADIENTS = {"loss", "reduction", "pipeline", "gradient norm", "clipping"}
"""Other results of the check `gradients`."""

HEALTHY = {
    "single": "",
    "mixed": f"precision=mixed {MICRO}",
    "bf16": "precision=bf16",
    "tp2+sp": f"{SP} precision=bf16_sr",
    "tp4, replicated heads": f"{KV} precision=bf16_sr_master",
    "dp2+zero1": f"{DP} parallelism.zero=1 precision=bf16_sr",
    "dp2+zero3": f"{DP} parallelism.zero=3 precision=mixed",
    "pp2": f"{PP} precision=mixed",
    "three dimensions": f"parallelism.dp=2 {SP} {PP} precision=bf16_sr parallelism.zero=1",
}

OPTIONS = {
    "interleaved": f"{PP} parallelism.stages_per_rank=2 precision=mixed "
    "parallelism.pipeline_schedule=interleaved",
    "zero bubble": f"{PP} parallelism.stages_per_rank=2 parallelism.pipeline_schedule=zero_bubble",
    "recomputed": f"{SP} parallelism.activation_checkpointing=full optimizer.grad_clip=0 "
    "optimizer.decay_norms=false",
    "masks, tied head": f"{TP} data.document_mask=true data.loss_mask=true "
    "model.tie_embeddings=true",
    "head tied to another stage": f"{PP} model.tie_embeddings=true",
    "two replicas": f"{HSDP} precision=bf16_sr",
    "experts on two ranks": EP,
    "experts with replicas": f"{EP_DP} parallelism.zero=1",
    "experts with FSDP": f"{EP_DP} parallelism.zero=3",
    "experts with limits": f"{EP} model.mlp.moe.capacity_factor=1.25 "
    "model.mlp.moe.balance_loss=0.1 model.mlp.moe.balance_scope=previous_step",
    "losses of micro batches": "model=olmoe_tiny model.mlp.moe.balance_loss=0.1 "
    "model.mlp.moe.balance_scope=micro_batch",
    "experts in bf16": "model=mixtral_tiny precision=mixed model.mlp.moe.capacity_factor=2",
    "experts and rounding": f"model=qwen3_moe_tiny precision=bf16_sr {TP} "
    "model.mlp.moe.num_groups=4 model.mlp.moe.groups_per_token=2",
    "NorMuon": f"{SP} precision=bf16_sr optimizer.name=normuon optimizer.normuon.joint_qkv=true",
    "SOAP and rounding": "precision=bf16_sr optimizer.name=soap",
    "SOAP": f"{DP} parallelism.zero=1 precision=mixed optimizer.name=soap "
    "optimizer.soap.max_preconditioner_dim=64",
    "gradient of zero": "model.attention.qkv_bias=true model.rope.layer_pattern=[false,true]",
}
FAMILIES = {name: f"model={name}" for name in list_choices("model") if name.endswith("_tiny")}
CORRECT = HEALTHY | OPTIONS | FAMILIES | {name: f"{KV} {COMPONENTS[name]}" for name in COMPONENTS}

DEFAULT = {"single", "olmo3_tiny", "qwen2_tiny"}
SLOW_BUGS = {
    *("one layer leaks", "documents see ahead", "labels not shifted", "gate without up"),
    *("mean of means", "scaled by sqrt(L)", "epsilon inside the root", "rate ignored"),
    *("decay through gradients", "rounds to nearest", "input gradients not summed"),
    *("key/value copies summed twice", "pipeline loses the last", "restored in bf16"),
    *("window in no layer", "window of the first layer", "no attention soft-cap"),
    *("scale of the head size", "llama3 without transition", "linear factor", "exact gelu"),
    *("dynamic scaling ignores the length", "layers rotate as the first", "relu not squared"),
    *("norms after the addition", "norms in another order", "QK-norm of each head"),
    *("residual multiplier ignored", "output bias on each rank", "one base in all layers"),
    *("QK-norm gradients not summed", "tied head drifts apart", "mask off by one"),
    *("rotary order", "norm without its mean", "layers drawn alike", "rounds away too often"),
    *("sum instead of mean", "window too short", "QK-norm after the rotation", "no bias"),
    *("llama3 factor", "yarn factor", "yarn without factor of queries and keys"),
    *("all of a head rotates", "all layers rotate", "no embedding scale", "sinks ignored"),
    *("norms before instead of after", "norm without 1 +"),
    *(bug for bug in training_mutants.FOUND if bug not in training_mutants.DEFAULT),
}
"""Bugs of which the default suite has one with the same check and axis."""
SEEDS = 2


@pytest.fixture(scope="session")
def reduced(compose, small):
    """Return the reduced configuration of the doctor for overrides of train."""
    data = [override for override in small if override.startswith("data.")]

    def make(overrides: str, *more: str):
        return reduce_config(resolve_config(compose(*data, *overrides.split(), *more)))

    return make


def test_every_bug_has_an_expected_result() -> None:
    others = {"a device multiplies wrongly", "a check raises on rank 0", "a check raises on rank 1"}
    assert FOUND.keys() | others == mutants.MUTANTS.keys()


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(bug, marks=[pytest.mark.slow] if bug in SLOW_BUGS else []) for bug in FOUND],
)
@pytest.mark.slow_after(12)
def test_injected_bug_is_found_and_named(ranks: Ranks, reduced, mutant: str) -> None:
    overrides, check, part, axis = FOUND[mutant]
    config = reduced(overrides)
    names = ["gradients" if check in OF_GRADIENTS else check]
    results = ranks.run(config.num_processes, mutants.diagnose, config, mutant, names)
    (outcome,) = [one for one in results[0] if one.check == check]
    assert outcome.status is CheckStatus.failed, outcome.message
    found_parts = [one for one in outcome.culprits if part in one.part]
    assert found_parts, outcome
    assert {one.axis for one in found_parts} == {axis}, outcome


def test_only_the_parameter_that_is_not_reduced_is_named(ranks: Ranks, reduced) -> None:
    config = reduced(DP)
    run = (mutants.diagnose, config, "one parameter not reduced", ["gradients", "replicas"])
    found = {one.check: one for one in ranks.run(2, *run)[0]}
    for check in ("gradients", "reduction", "replicas"):
        assert {one.part for one in found[check].culprits} == {
            "model.layers.1.mlp.down_proj.weight"
        }
    assert "sequences of data-parallel ranks count 1, 0 times" in found["reduction"].message


@pytest.mark.parametrize(
    ("mutant", "code", "failed"),
    [
        pytest.param(
            *("one parameter not reduced", ExitCode.DIVERGED, "reduction"), marks=pytest.mark.slow
        ),
        ("a device multiplies wrongly", ExitCode.UNHEALTHY_NODE, "machine"),
    ],
)
def test_exit_code_differs_between_arithmetic_and_machine(
    ranks: Ranks, reduced, tmp_path, mutant: str, code: ExitCode, failed: str
) -> None:
    config = reduced(DP)
    results = ranks.run(2, mutants.exit_code, config, str(tmp_path), mutant)
    assert [found for found, _ in results] == [code] * 2
    assert f"FAIL  {failed}" in results[0][1]
    assert "in a run: " in results[0][1]
    assert results[1][1] == ""
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert not record["healthy"]
    bad = [one for one in record["checks"] if one["status"] == "FAIL"]
    assert failed in [one["check"] for one in bad]
    assert all(one["culprits"] and one["symptom"] for one in bad)


@pytest.mark.parametrize(
    ("mutant", "overrides", "failed"),
    [
        ("a result is NaN", "", {"labels", "loss", "gradients", "next step"}),
        pytest.param(
            *("a result is NaN", DP, {"labels", "loss", "gradients", "next step"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("a gradient has a NaN", DP, {"gradients", "gradient norm"}), marks=pytest.mark.slow
        ),
        *(
            pytest.param(f"a check raises on rank {rank}", DP, {"labels"}, marks=pytest.mark.slow)
            for rank in (0, 1)
        ),
    ],
)
def test_all_checks_run_and_are_recorded(
    ranks: Ranks, reduced, tmp_path, mutant: str, overrides: str, failed: set[str]
) -> None:
    config = reduced(overrides)
    run = (mutants.exit_code, config, str(tmp_path), mutant)
    results = ranks.run(config.num_processes, *run)
    assert {code for code, _ in results} == {ExitCode.DIVERGED}
    text = (tmp_path / "doctor.json").read_text()
    record = json.loads(text, parse_constant=pytest.fail)
    assert {*CHECKS} <= {check["check"] for check in record["checks"]}
    assert failed <= {row["check"] for row in record["checks"] if row["status"] == "FAIL"}
    if "raises" in mutant:
        (row,) = [row for row in record["checks"] if row["status"] == "FAIL"]
        rank = mutant[-1]
        assert (
            row["message"] == f"the check raised ZeroDivisionError: division by zero on rank {rank}"
        )


def test_only_the_leaking_head_is_named(ranks: Ranks, reduced) -> None:
    config = reduced("")
    (outcome,) = ranks.run(1, mutants.diagnose, config, "one head leaks", ["causality"])[0]
    assert {one.part for one in outcome.culprits} == {"layer 0 head 1", "layer 1 head 1"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in CORRECT],
)
@pytest.mark.slow_after(3)
def test_correct_run_passes(ranks: Ranks, reduced, name: str) -> None:
    config = reduced(CORRECT[name])
    for outcome in ranks.run(config.num_processes, mutants.diagnose, config, None, [*CHECKS])[0]:
        assert outcome.status is not CheckStatus.failed, outcome


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
@pytest.mark.parametrize("name", HEALTHY | FAMILIES)
def test_no_false_alarm(ranks: Ranks, reduced, name: str, seed: int) -> None:
    config = reduced(CORRECT[name], f"run.seed={seed}")
    for outcome in ranks.run(config.num_processes, mutants.diagnose, config, None, ARITHMETIC)[0]:
        assert outcome.status is not CheckStatus.failed, outcome
