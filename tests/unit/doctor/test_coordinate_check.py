"""Planted faults of parametrizations, and the coordinate check without faults."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.doctor import check_runner, coordinate_check
from hlat.doctor.check_result import CheckResult, CheckStatus
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.reduced_config import reduce_config
from hlat.engine.engine_factory import create_engine
from hlat.model import attention, decoder, weight_initialization
from hlat.model.parameter_spec import ParameterRole
from hlat.model.parametrization_spec import compute_width_ratio
from hlat.optim import optimizer_factory

MUP = (
    "parametrization=mup model.parametrization.base_width=32 model.parametrization.base_head_dim=8"
)
COMPLETEP = (
    "parametrization=completep model.parametrization.base_width=32 "
    "model.parametrization.base_depth=2"
)
TIED = f"{COMPLETEP} model.tie_embeddings=true"


@contextlib.contextmanager
def _open_harness(overrides: str, root: Any) -> Iterator[EngineHarness]:
    config = resolve_config(compose_config([f"run.root={root}", *overrides.split()]))
    harness = EngineHarness(reduced := reduce_config(config), create_engine(reduced))
    yield harness
    harness.engine.close()


def _check(overrides: str, root: Any) -> CheckResult:
    with _open_harness(overrides, root) as harness:
        [result] = check_runner.run_checks(harness, ["coordinates"])
    return result


def _update(change: Callable[[ParameterRole, float], dict[str, float]]) -> Any:
    """Multiply settings of the updates of a role, given the role and the width."""
    right = optimizer_factory.compute_update_settings

    def compute(settings: Any, role: ParameterRole, model: Any = None) -> Any:
        found = right(settings, role, model)
        factors = change(role, compute_width_ratio(model))
        changed = {name: getattr(found, name) * factor for name, factor in factors.items()}
        return dataclasses.replace(found, **changed)

    return mock.patch.object(optimizer_factory, "compute_update_settings", compute)


def _rate_of(role: ParameterRole, power: int) -> Any:
    return _update(lambda found, width: {"lr_factor": width**power} if found is role else {})


def _init_of_base(parameter: Any, model: Any) -> float:
    base = dataclasses.replace(model.parametrization, base_width=None)
    return right_init(parameter, dataclasses.replace(model, parametrization=base))


right_init = weight_initialization.compute_init_std
FAULTS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "output multiplier": (
        MUP,
        lambda: mock.patch.object(decoder, "compute_output_multiplier", return_value=1.0),
        "output multiplier",
    ),
    "attention scale": (
        MUP,
        lambda: mock.patch.object(
            attention, "compute_attention_scale", lambda model: model.head_dim**-0.5
        ),
        "attention scale",
    ),
    "embedding rate": (
        MUP,
        lambda: _rate_of(ParameterRole.embedding, -1),
        "learning rate of embedding",
    ),
    "hidden rate": (MUP, lambda: _rate_of(ParameterRole.matrix, 1), "learning rate of matrix"),
    "head rate": (COMPLETEP, lambda: _rate_of(ParameterRole.head, -1), "learning rate of head"),
    "initialization": (
        MUP,
        lambda: mock.patch.object(weight_initialization, "compute_init_std", _init_of_base),
        "initialization of matrix",
    ),
    "eps not scaled": (
        MUP,
        lambda: _update(lambda role, width: {"eps_factor": width}),
        "eps of matrix",
    ),
    "decay scaled": (
        MUP,
        lambda: _update(lambda role, width: {"weight_decay": width}),
        "weight decay of matrix",
    ),
    "residual multiplier": (
        COMPLETEP,
        lambda: mock.patch.object(decoder, "compute_residual_multiplier", return_value=1.0),
        "residual multiplier",
    ),
    "tied head": (
        TIED,
        lambda: mock.patch.object(
            decoder, "compute_output_multiplier", lambda model: 1.0 if model.tie_embeddings else 0.0
        ),
        "output multiplier of the tied head",
    ),
}
"""Overrides, planted fault and the quantity that the check names."""


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path, monkeypatch) -> None:
    overrides, plant, quantity = FAULTS[name]
    monkeypatch.setattr(coordinate_check, "FACTORS", (1, 2))
    monkeypatch.setattr(coordinate_check, "_NUM_SEEDS", 1)
    with plant():
        result = _check(overrides, tmp_path)
    assert result.status is CheckStatus.failed
    rules = [fault.part for fault in result.culprits if fault.axis == "rules"]
    assert quantity in rules
    assert f"{quantity}: " in result.message
    if "rate" in name or "multiplier" in name:
        assert rules == [quantity], "nothing else is wrong"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [MUP, COMPLETEP, TIED])
def test_right_rules_pass_with_a_figure(overrides: str, tmp_path) -> None:
    result = _check(overrides, tmp_path)
    assert result.status is CheckStatus.passed, result.message
    [figure] = tmp_path.rglob(coordinate_check.FIGURE_FILE)
    assert figure.read_bytes().startswith(b"\x89PNG")
    width = [value for name, value in result.numbers.items() if name.startswith("width ")]
    assert len(width) == 5
    assert max(map(abs, width)) < 0.2


@pytest.mark.slow
def test_missing_rules_change_the_slopes(tmp_path) -> None:
    """The slopes show the rates of the standard parametrization, and one wrong rate."""
    standard = _check("", tmp_path)
    assert standard.status is CheckStatus.passed
    assert standard.numbers["width attention"] > 1
    with _rate_of(ParameterRole.matrix, 1):
        result = _check(MUP, tmp_path)
    slopes = {fault.part for fault in result.culprits if fault.axis == "width"}
    assert {"mlp", "residual stream"} <= slopes


def test_scaled_configurations_have_the_base_of_the_reduced_model() -> None:
    config: Config = reduce_config(resolve_config(compose_config(MUP.split())))
    scaled = coordinate_check.scale_config(config, {"width": 4, "depth": 2})
    assert scaled.model.hidden_size == 4 * config.model.hidden_size
    assert scaled.model.head_dim == 4 * config.model.head_dim
    assert scaled.model.num_attention_heads == config.model.num_attention_heads
    assert scaled.model.num_layers == 2 * config.model.num_layers
    assert compute_width_ratio(scaled.model) == 4
    with_heads = coordinate_check.scale_config(
        reduce_config(resolve_config(compose_config(COMPLETEP.split()))), {"width": 4}
    )
    assert with_heads.model.num_attention_heads == 4 * config.model.num_attention_heads
