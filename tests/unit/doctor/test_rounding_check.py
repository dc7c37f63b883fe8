"""The check of the rounding does not apply to an optimizer without updates that are known."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

from hlat.config.resolve import resolve_config
from hlat.doctor.check_result import CheckStatus
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.reduced_config import reduce_config
from hlat.doctor.rounding_check import check_rounding


def test_steps_without_gradients_that_change_no_weight_are_not_checked(compose) -> None:
    overrides = ("precision=bf16_sr", "optimizer.beta1=0", "optimizer.weight_decay=0")
    config = reduce_config(resolve_config(compose(*overrides)))
    harness = SimpleNamespace(config=config)
    harness.without_router_losses = lambda: nullcontext(harness)
    (result,) = check_rounding(cast(EngineHarness, harness))
    assert result.status is CheckStatus.not_applicable
    assert "optimizer.beta1" in result.message
