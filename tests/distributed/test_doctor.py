"""The doctor finds each bug that is planted, blames what is to blame, and nothing where all is
well."""

import json

import pytest

from hlat.config.config_errors import ExitCode
from hlat.config.resolve import resolve_config
from hlat.doctor.check_result import CheckStatus
from hlat.doctor.check_runner import CHECKS
from hlat.doctor.reduced_config import reduce_config
from tests.distributed import mutants
from tests.distributed.mutants import DP, FOUND, KV, MICRO, PP, SP, TP
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

ARITHMETIC = [name for name in CHECKS if name != "data"]
"""Of which none starts processes of its own."""

OF_GRADIENTS = {"loss", "reduction", "pipeline", "gradient norm"}
"""What the check `gradients` finds beside its own."""

HEALTHY = {
    "alone": "",
    "mixed": f"precision=mixed {MICRO}",
    "bf16": "precision=bf16",
    "tp2+sp": f"{SP} precision=bf16_sr",
    "tp4, copies of heads": f"{KV} precision=bf16_sr_master",
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
}


@pytest.fixture(scope="session")
def shrunk(compose, small):
    """The small configuration that the doctor makes of overrides of train."""
    data = [word for word in small if word.startswith("data.")]

    def make(words: str, *more: str):
        return reduce_config(resolve_config(compose(*data, *words.split(), *more)))

    return make


def test_every_mutant_is_expected_somewhere() -> None:
    assert {*FOUND, "a device multiplies wrongly"} == mutants.MUTANTS.keys()


@pytest.mark.parametrize("mutant", FOUND)
def test_a_planted_bug_is_found_and_named(ranks: Ranks, shrunk, mutant: str) -> None:
    words, check, part, axis = FOUND[mutant]
    config = shrunk(words)
    names = ["gradients" if check in OF_GRADIENTS else check]
    told = ranks.run(config.num_processes, mutants.diagnose, config, mutant, names)
    (outcome,) = [one for one in told[0] if one.check == check]
    assert outcome.status is CheckStatus.failed, outcome.said
    blamed = [one for one in outcome.culprits if part in one.part]
    assert blamed, outcome
    assert {one.axis for one in blamed} == {axis}, outcome


def test_a_parameter_that_is_not_reduced_is_the_only_one_blamed(ranks: Ranks, shrunk) -> None:
    config = shrunk(DP)
    run = (mutants.diagnose, config, "one parameter not reduced", ["gradients", "replicas"])
    found = {one.check: one for one in ranks.run(2, *run)[0]}
    for check in ("gradients", "reduction", "replicas"):
        assert {one.part for one in found[check].culprits} == {
            "model.layers.1.mlp.down_proj.weight"
        }
    assert "sequences of data-parallel ranks count 1, 0 times" in found["reduction"].said


@pytest.mark.parametrize(
    ("mutant", "code", "failed"),
    [
        ("one parameter not reduced", ExitCode.DIVERGED, "reduction"),
        ("a device multiplies wrongly", ExitCode.UNHEALTHY_NODE, "machine"),
    ],
)
def test_the_exit_code_tells_arithmetic_from_a_machine(
    ranks: Ranks, shrunk, tmp_path, mutant: str, code: ExitCode, failed: str
) -> None:
    config = shrunk(DP)
    told = ranks.run(2, mutants.exit_code, config, str(tmp_path), mutant)
    assert [found for found, _ in told] == [code] * 2
    assert f"FAIL  {failed}" in told[0][1]
    assert "in a run: " in told[0][1]
    assert told[1][1] == ""
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert not record["healthy"]
    bad = [one for one in record["checks"] if one["status"] == "FAIL"]
    assert failed in [one["check"] for one in bad]
    assert all(one["culprits"] and one["symptom"] for one in bad)


def test_one_leaking_head_is_the_only_one_blamed(ranks: Ranks, shrunk) -> None:
    config = shrunk("")
    (outcome,) = ranks.run(1, mutants.diagnose, config, "one head leaks", ["causality"])[0]
    assert {one.part for one in outcome.culprits} == {"layer 0 head 1", "layer 1 head 1"}


@pytest.mark.parametrize("name", [*HEALTHY, *OPTIONS])
def test_nothing_is_found_where_all_is_well(ranks: Ranks, shrunk, name: str) -> None:
    config = shrunk((HEALTHY | OPTIONS)[name])
    for outcome in ranks.run(config.num_processes, mutants.diagnose, config, None, [*CHECKS])[0]:
        assert outcome.status is not CheckStatus.failed, outcome


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(ranks: Ranks, shrunk, name: str, seed: int) -> None:
    config = shrunk(HEALTHY[name], f"run.seed={seed}")
    for outcome in ranks.run(config.num_processes, mutants.diagnose, config, None, ARITHMETIC)[0]:
        assert outcome.status is not CheckStatus.failed, outcome
