"""The doctor passes hlat's engine on neuronx-distributed, and finds each of NxD's faults without
its workaround."""

import pytest

from hlat.config.resolve import resolve_config
from hlat.doctor.check_result import CheckStatus
from hlat.doctor.reduced_config import reduce_config
from tests.nxd.support.ranks import require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()

LAYOUTS = {
    "alone": "",
    "dp2+zero1": "parallelism.dp=2 parallelism.zero=1",
    "tp2+sp": "parallelism.tp=2 parallelism.sequence_parallel=true",
    "tp4, copies of heads": "parallelism.tp=4",
    "pp2": "parallelism.pp=2 batch.micro_batch_size=2",
}
CHECKS = [
    *("initialisation", "causality", "labels", "gradients", "next step", "accumulation"),
    *("replicas", "rounding", "optimizer", "numerics", "checkpoint"),
]

TP, ZERO = "parallelism.tp=2", "parallelism.dp=2 parallelism.zero=1"
FOUND = {
    "1 input gradients not summed": (f"{TP} precision=bf16", "gradients", "layers.0.", "tp+dp"),
    "2 masters not loaded": (ZERO, "checkpoint", "next step", "here"),
    "3 clipped at one": (f"{ZERO} optimizer.grad_clip=0.5", "gradient norm", "grad_norm", "dp"),
    "4 marks lost": (TP, "gradient norm", "grad_norm", "tp"),
    "4 key/value copies count each": ("parallelism.tp=4", "gradient norm", "grad_norm", "kv"),
    "5 rows repeated": ("parallelism.tp=4", "initialisation", "k_proj", "tp"),
    "6 stages drawn alike": (LAYOUTS["pp2"], "initialisation", "layers.1.", "pp"),
    "7 norms in bf16": ("", "gradients", "layernorm", "model"),
}
"""Overrides, failing check, part of the name of the finding, and axis of each fault."""
OF_GRADIENTS = {"gradient norm": "gradients"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_correct_run_passes(compose, tmp_path, name: str) -> None:
    overrides = ["engine=nxd", f"run.root={tmp_path}", *LAYOUTS[name].split()]
    config = reduce_config(resolve_config(compose(*overrides)))
    outcomes = run(config.num_processes, "doctor.diagnose", config, CHECKS)[0]
    for outcome in outcomes:
        assert outcome.status is not CheckStatus.failed, outcome
    assert len(outcomes) == len(CHECKS) + 5


@pytest.mark.parametrize("fault", FOUND)
def test_each_of_nxds_faults_is_found_and_named(compose, tmp_path, fault: str) -> None:
    overrides, check, part, axis = FOUND[fault]
    config = reduce_config(
        resolve_config(compose("engine=nxd", f"run.root={tmp_path}", *overrides.split()))
    )
    names = [OF_GRADIENTS.get(check, check)]
    outcomes = run(config.num_processes, "doctor.diagnose", config, names, fault)[0]
    (outcome,) = [one for one in outcomes if one.check == check]
    assert outcome.status is CheckStatus.failed, outcome.message
    assert {one.axis for one in outcome.culprits if part in one.part} == {axis}, outcome
