"""Cost of the optimizer's update against manual examples."""

import pytest
from omegaconf import OmegaConf

from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.plan import update_cost
from hlat.plan.pipeline_stage_shards import PipelineStageShard
from hlat.plan.step_time import predict_step_time
from tests.support.planned_stages import evaluate_stage


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def _evaluate(config, name, *stage):
    return evaluate_stage(getattr(update_cost, name), config, *stage)


def test_optimizer_bytes_include_every_copy(config):
    def count_optimizer_bytes(*overrides):
        roles = ((ParameterRole.embedding, 400), (ParameterRole.matrix, 600))
        stage = PipelineStageShard(((0, 1),), (600,), 1, 1.0, 400, roles, 600, True, True)
        return _evaluate(config(*overrides), "compute_optimizer_bytes", stage)

    assert count_optimizer_bytes("precision=bf16_sr") == 1000 * (2 + 2 * 2 + 2 * 4)
    assert count_optimizer_bytes("precision=mixed") == 1000 * (4 + 2 * 4 + 2 * 8 + 2)
    assert (
        count_optimizer_bytes("precision=mixed", "parallelism.dp=4", "parallelism.zero=1")
        == 250 * 30
    )


def test_update_takes_the_longer_of_flops_and_memory_traffic(config, monkeypatch):
    args = ("model=7b", "hardware=a100_p4d", "precision=mixed", "parallelism.zero=1")
    run = config(*args, "hardware.nodes=4", "parallelism.tp=4")
    numel = _evaluate(run, "compute_optimizer_bytes") / 30  # of a data-parallel rank
    assert predict_step_time(run).optimizer == pytest.approx(30 * numel / 1555e9)
    monkeypatch.setattr(AdamWSpec, "get_update_flops", lambda self, role: 10_000)
    assert predict_step_time(run).optimizer == pytest.approx(10_000 * numel / 19.5e12)
    trn1 = config("experiment=hlat_7b")  # the peak of element-wise operations is unknown
    num_bytes = _evaluate(trn1, "compute_optimizer_bytes")
    assert predict_step_time(trn1).optimizer == pytest.approx(num_bytes / 440e9)
