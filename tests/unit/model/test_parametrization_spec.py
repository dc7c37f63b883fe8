"""Factors of parametrizations compared with nanoGPT-mup and muP, and equality at the base size."""

import dataclasses
import math

import numpy as np
import pytest

from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig, RoleLearningRates
from hlat.model.decoder_spec import ScaledInit, compute_init_std, list_parameter_specs
from hlat.model.parameter_spec import Initialization, ParameterRole
from hlat.model.parametrization_spec import (
    ParametrizationConfig,
    ParametrizationName,
    compute_attention_scale,
    compute_output_multiplier,
    compute_residual_multiplier,
)
from hlat.model.weight_initialization import compute_initial_values
from hlat.optim.muon_spec import MuonConfig, UpdateScale
from hlat.optim.optimizer_factory import build_group_settings

WIDTH, DEPTH = 4, 6
BASE = ModelConfig(
    name="base",
    num_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
    scaled_init=ScaledInit.none,
)
LARGE = dataclasses.replace(
    BASE,
    num_layers=DEPTH * 2,
    hidden_size=WIDTH * 32,
    intermediate_size=WIDTH * 64,
    num_attention_heads=WIDTH * 4,
    num_key_value_heads=WIDTH * 2,
)
ADAMW = OptimizerConfig(lr=3e-3, eps=1e-3, weight_decay=0.1)


def parametrize(model: ModelConfig, name: str, **sizes: int) -> ModelConfig:
    sizes = {"base_width": 32, **({"base_depth": 2} if name == "completep" else {}), **sizes}
    base = ParametrizationConfig(ParametrizationName(name), **sizes)
    return dataclasses.replace(model, parametrization=base)


def list_nanogpt_groups(is_completep: bool) -> dict[str, tuple[float, float, float, float]]:
    """Return init std, lr_scale, weight_decay and eps of nanoGPT-mup at 3904404 (model.py).

    `__init__` sets the standard deviations, `configure_optimizers` the groups.
    """
    depth_multiplier = DEPTH if is_completep else 1
    mup_width_multiplier, init_std, adam_eps, weight_decay = WIDTH, BASE.init_std, 1e-3, 0.1
    depth_lr_scaling, width_lr_scaling = depth_multiplier ** (1 - 1), 1 / mup_width_multiplier
    emb_unemb_adam_eps = adam_eps / mup_width_multiplier
    hidden = (
        init_std / math.sqrt(mup_width_multiplier),
        width_lr_scaling * depth_lr_scaling,
        weight_decay / width_lr_scaling if is_completep else weight_decay,
        adam_eps / mup_width_multiplier * depth_multiplier**-1,
    )
    outer = (init_std, 1.0, weight_decay, emb_unemb_adam_eps)
    return {"matrix": hidden, "residual": hidden, "embedding": outer, "head": outer}


@pytest.mark.parametrize("name", ["mup", "completep"])
def test_matrices_have_the_values_of_nanogpt_mup(name: str) -> None:
    model = parametrize(LARGE, name)
    expected = list_nanogpt_groups(name == "completep")
    for spec in list_parameter_specs(model):
        group = build_group_settings(ADAMW, spec.role, model)
        if spec.init is not Initialization.normal:
            assert group["lr_factor"] == 1
            assert group["weight_decay"] == 0.1
            assert group["eps"] == pytest.approx(expected["matrix"][3])
            continue
        found = (
            compute_init_std(spec, model),
            *(group[key] for key in ("lr_factor", "weight_decay", "eps")),
        )
        assert found == pytest.approx(expected[spec.role.value], rel=1e-12), spec.name


def test_multipliers_are_those_of_the_papers() -> None:
    model = parametrize(LARGE, "completep", base_head_dim=2)
    assert model.head_dim == 8
    assert compute_attention_scale(model) == pytest.approx(1 / math.sqrt(2) * 2 / 8)
    assert compute_residual_multiplier(model) == 1 / DEPTH
    assert compute_output_multiplier(model) == 1 / WIDTH
    mup = parametrize(LARGE, "mup")
    assert compute_residual_multiplier(mup) == 1
    assert compute_attention_scale(mup) == 8**-0.5


@pytest.mark.parametrize("name", ["mup", "completep"])
@pytest.mark.parametrize("scaled_init", [ScaledInit.none, ScaledInit.depth])
@pytest.mark.parametrize("tie", [False, True])
def test_the_base_model_equals_the_standard_one(
    name: str, scaled_init: ScaledInit, tie: bool
) -> None:
    model = dataclasses.replace(BASE, scaled_init=scaled_init, tie_embeddings=tie)
    base = parametrize(model, name, base_head_dim=8)
    for spec in list_parameter_specs(model):
        start = (0,) * len(spec.shape)
        values = [compute_initial_values(spec, one, 1, start, spec.shape) for one in (model, base)]
        assert np.array_equal(*values), spec.name
        for optimizer in (ADAMW, dataclasses.replace(ADAMW, name="muon")):
            groups = [build_group_settings(optimizer, spec.role, one) for one in (model, base)]
            assert groups[0] == groups[1], spec.name
    for compute in (
        compute_attention_scale,
        compute_residual_multiplier,
        compute_output_multiplier,
    ):
        assert compute(base) == compute(model)


def test_initial_values_of_completep_do_not_depend_on_the_depth() -> None:
    deep = parametrize(
        dataclasses.replace(BASE, num_layers=8, scaled_init=ScaledInit.depth), "completep"
    )
    spec = next(one for one in list_parameter_specs(deep) if one.role is ParameterRole.residual)
    assert compute_init_std(spec, deep) == pytest.approx(BASE.init_std / math.sqrt(2 * 2))


@pytest.mark.parametrize(("scale", "ratio"), [("original", 1.0), ("match_rms_adamw", 0.5)])
def test_the_spectral_norm_of_an_update_of_muon_depends_on_no_width(
    scale: str, ratio: float
) -> None:
    settings = OptimizerConfig(name="muon", lr=0.02, muon=MuonConfig(scale=UpdateScale(scale)))
    model = parametrize(LARGE, "mup")
    group = build_group_settings(settings, ParameterRole.matrix, model)
    assert group["lr_factor"] == pytest.approx(ratio)
    assert group["weight_decay"] == 0.1
    keeps_product = build_group_settings(
        settings, ParameterRole.matrix, parametrize(LARGE, "completep")
    )
    assert keeps_product["lr_factor"] * keeps_product["weight_decay"] == pytest.approx(0.1)
    assert build_group_settings(settings, ParameterRole.head, model)["lr_factor"] == 1


def test_rates_by_role_replace_those_of_the_optimizer() -> None:
    assert [*vars(RoleLearningRates())] == [role.value for role in ParameterRole]
    rates = RoleLearningRates(embedding=6e-3, matrix=1e-3)
    muon = MuonConfig(adamw_lr=1e-2)
    settings = dataclasses.replace(ADAMW, name="muon", lr_by_role=rates, muon=muon)
    factors = {
        role: build_group_settings(settings, role)["lr_factor"] * settings.lr
        for role in ParameterRole
    }
    expected = {ParameterRole.embedding: 6e-3, ParameterRole.matrix: 1e-3}
    expected |= {ParameterRole.residual: settings.lr}
    assert factors == pytest.approx({role: expected.get(role, 1e-2) for role in ParameterRole})


def test_the_standard_parametrization_has_no_factors() -> None:
    for role in ParameterRole:
        assert build_group_settings(ADAMW, role, LARGE) == build_group_settings(ADAMW, role)
