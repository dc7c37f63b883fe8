"""The doctor finds neuronx-distributed's arithmetic right, under hlat's engine."""

import pytest

from hlat.config.resolve import resolve
from hlat.diagnosis.shrink import shrink
from hlat.diagnosis.verdict import Status
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_found_where_all_is_well(compose, tmp_path, name: str) -> None:
    words = ["engine=nxd", f"run.root={tmp_path}", *LAYOUTS[name].split()]
    config = shrink(resolve(compose(*words)))
    outcomes = run(config.num_processes, "doctor.diagnose", config, CHECKS)[0]
    for outcome in outcomes:
        assert outcome.status is not Status.failed, outcome
    assert len(outcomes) == len(CHECKS) + 4
