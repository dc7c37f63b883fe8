"""The Neuron environment under different pins."""

import pytest

from hlat.config.compiler import CompilerConfig
from hlat.config.config_errors import ConfigError
from hlat.config.precision import Dtype, Fp32Operator, PrecisionConfig, RoundingMode
from hlat.engine.neuron.neuron_environment import build_neuron_environment, find_compiler_problems

FP32, BF16 = Dtype.fp32, Dtype.bf16
RECIPES = {
    "fp32": PrecisionConfig("fp32", *[FP32] * 6),
    "bf16": PrecisionConfig("bf16", *[BF16] * 6),
    "bf16_sr": PrecisionConfig("bf16_sr", *[BF16] * 6, rounding=RoundingMode.stochastic),
    "bf16_sr_master": PrecisionConfig(
        "bf16_sr_master", *[BF16] * 5, FP32, FP32, rounding=RoundingMode.stochastic
    ),
    "mixed": PrecisionConfig("mixed", BF16, BF16, BF16, FP32, FP32, FP32, FP32, list(Fp32Operator)),
}


def pinned(sdk: str | None, **variables: str) -> CompilerConfig:
    return CompilerConfig("test", sdk, [], variables)


def test_nothing_without_a_pin() -> None:
    assert build_neuron_environment(pinned(None), RECIPES["bf16_sr"]) == {}
    assert find_compiler_problems(pinned(None)) == []


@pytest.mark.parametrize(
    ("recipe", "variable", "stochastic"),
    [
        ("fp32", None, "0"),
        ("bf16", "XLA_USE_BF16", "0"),
        ("bf16_sr", "XLA_USE_BF16", "1"),
        ("bf16_sr_master", "XLA_DOWNCAST_BF16", "1"),
        ("mixed", "XLA_DOWNCAST_BF16", "0"),
    ],
)
def test_recipe_under_an_old_pin(recipe: str, variable: str | None, stochastic: str) -> None:
    expected = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": stochastic}
    expected |= {variable: "1"} if variable else {}
    for sdk in ("2.20.0", "2.24"):
        assert build_neuron_environment(pinned(sdk), RECIPES[recipe]) == expected
    assert not any(
        name.startswith("XLA") for name in build_neuron_environment(pinned("2.25"), RECIPES[recipe])
    )


def test_flags_are_joined_and_variables_passed_on() -> None:
    flags = ["--model-type transformer", "--distribution-strategy=llm-training"]
    compiler = CompilerConfig("trn1", "2.28", flags, {"NEURON_FUSE_SOFTMAX": "1"})
    assert build_neuron_environment(compiler, RECIPES["mixed"]) == {
        "NEURON_CC_FLAGS": "--model-type transformer --distribution-strategy=llm-training",
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
    }
    assert find_compiler_problems(compiler) == []


@pytest.mark.parametrize(
    ("name", "last", "first", "replacement"),
    [
        ("XLA_USE_BF16", "2.24.1", "2.25", "precision=bf16_sr"),
        ("XLA_DOWNCAST_BF16", "2.24", "2.25.0", "precision=mixed"),
        ("BUCKET_CAP_MB", "2.20", "2.21", "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"),
        ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "2.30", "2.31", "there is no replacement"),
    ],
)
def test_a_dropped_variable_is_rejected(name: str, last: str, first: str, replacement: str) -> None:
    assert find_compiler_problems(pinned(last, **{name: "1"})) == []
    (problem,) = find_compiler_problems(pinned(first, **{name: "1"}))
    assert problem.startswith(f"compiler.environment.{name} ")
    assert f"compiler.neuron_sdk={first}" in problem
    assert replacement in problem


def test_a_variable_that_another_key_sets_is_rejected() -> None:
    assert find_compiler_problems(pinned("2.28", NEURON_CC_FLAGS="-O1")) == [
        "compiler.environment.NEURON_CC_FLAGS follows from compiler.cc_flags; set compiler.cc_flags "
        "instead"
    ]
    (problem,) = find_compiler_problems(pinned("2.28", NEURON_RT_STOCHASTIC_ROUNDING_EN="1"))
    assert "precision.rounding" in problem


def test_a_variable_that_breaks_an_engine_is_rejected() -> None:
    (problem,) = find_compiler_problems(pinned("2.28", XLA_USE_DUMMY_STORE="1"))
    assert problem.startswith("compiler.environment.XLA_USE_DUMMY_STORE removes the store")


@pytest.mark.parametrize(
    "name",
    [
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONSTARTUP", "PYTHONPATH", "BASH_ENV", "PATH"),
        *("NEURON_LIBRARY_PATH", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE", "FI_PROVIDER_PATH", "xla_x"),
    ],
)
def test_refuse_variables_that_may_load_code(name: str) -> None:
    compiler = pinned("2.28", **{name: "x"})
    (problem,) = find_compiler_problems(compiler)
    assert problem.startswith(f"compiler.environment.{name} is not allowed")
    with pytest.raises(ConfigError, match=name):
        build_neuron_environment(compiler, RECIPES["fp32"])


def test_every_problem_is_reported() -> None:
    assert (
        len(
            find_compiler_problems(
                pinned("2.33.1", XLA_USE_BF16="1", BUCKET_CAP_MB="1", FI_PROVIDER="efa")
            )
        )
        == 2
    )


@pytest.mark.parametrize("pin", ["2.33", "2.33.0"])
def test_a_release_that_can_hang_is_rejected(pin: str) -> None:
    (problem,) = find_compiler_problems(pinned(pin))
    assert problem.startswith(f"compiler.neuron_sdk={pin} can hang")
    assert not find_compiler_problems(pinned("2.33.1"))


@pytest.mark.parametrize("pin", ["latest", "2", "v2.28", "2.28.x"])
def test_unknown_pin(pin: str) -> None:
    (problem,) = find_compiler_problems(pinned(pin))
    assert problem.startswith(f"compiler.neuron_sdk={pin} ")
    with pytest.raises(ValueError, match=r"compiler\.neuron_sdk"):
        build_neuron_environment(pinned(pin), RECIPES["bf16"])


def test_settings_without_a_pin_are_not_ignored() -> None:
    compiler = CompilerConfig("none", None, ["-O1"], {"FI_PROVIDER": "efa"})
    assert [problem.split()[0] for problem in find_compiler_problems(compiler)] == [
        "compiler.cc_flags",
        "compiler.environment",
    ]
