"""Length of a run relative to its model: counts by hand, shared runs and conflicts."""

import pytest

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.sweep_axes import load_sweep_axes


def resolve(*overrides):
    return resolve_config(compose_config([*overrides]))


def count_by_hand(layers: int, width: int, mlp: int, vocabulary: int = 4096) -> int:
    """Return the parameters of a Llama with multi-head attention and an untied head."""
    layer = 4 * width**2 + 3 * width * mlp + 2 * width
    return layers * layer + 2 * vocabulary * width + width


@pytest.mark.parametrize("size", range(2, 8))
def test_ladder_follows_its_rule(size):
    """Depth n, width 16 n, n heads, and an MLP of 8/3 of the width in multiples of 8."""
    config = resolve("experiment=ladder", f"model=ladder_{size}")
    model = config.model
    assert (model.num_layers, model.hidden_size, model.head_dim) == (size, 16 * size, 16)
    assert model.num_attention_heads == model.num_key_value_heads == size
    assert abs(model.intermediate_size - 128 * size / 3) <= 4
    assert model.intermediate_size % 8 == 0
    parameters = count_by_hand(size, 16 * size, model.intermediate_size)
    assert config.schedule.total_steps == round(1.4 * parameters / 1024)
    assert config.schedule.warmup_steps == round(0.1 * config.schedule.total_steps)


def test_steps_follow_from_the_flops():
    """Six FLOPs per weight of the matrices and the head, and causal attention on average."""
    words = ["experiment=ladder", "model=ladder_3", "schedule.tokens_per_parameter=null"]
    config = resolve(*words, "schedule.training_flops=2e12")
    model = config.model
    weights = 3 * (4 * 48**2 + 3 * 48 * model.intermediate_size) + 4096 * 48
    attention = 3 * 2 * 3 * 128 * 48  # both matmuls over half of 128 positions, times three
    assert config.schedule.total_steps == round(2e12 / (6 * weights + attention) / 1024)


def test_equal_runs_of_different_axes_are_one_run():
    one = resolve("experiment=ladder", "schedule.tokens_per_parameter=0.7")
    steps = one.schedule.total_steps
    other = resolve(
        "experiment=ladder",
        "schedule.tokens_per_parameter=null",
        "schedule.warmup_fraction=null",
        f"schedule.total_steps={steps}",
        f"schedule.warmup_steps={one.schedule.warmup_steps}",
    )
    assert one.run.name == other.run.name
    assert one == other


def list_names(study: str, *overrides: str) -> set[str]:
    sweep = load_sweep_axes([f"+sweep={study}", *overrides])
    return {
        resolve(*sweep.overrides, *(f"{key}={value}" for key, value in point.items())).run.name
        for point in sweep.list_points()
    }


def test_studies_share_equal_runs():
    ladder = list_names("ladder", "model=ladder_4")
    assert len(ladder) == 8
    assert len(list_names("tokens_per_parameter") & ladder) == 8


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["schedule.training_flops=1e12"], "both set the length of the run; set one of them"),
        (["schedule.total_steps=40"], "conflict; remove the first, or add schedule.tokens_per"),
        (["schedule.warmup_steps=4"], "schedule.warmup_steps=4 and schedule.warmup_fraction=0.1"),
        (["schedule.tokens_per_parameter=-1"], "schedule.tokens_per_parameter=-1.0 is outside"),
        (["schedule.warmup_fraction=1"], "schedule.warmup_fraction=1.0 is outside [0, 1)"),
    ],
)
def test_conflicts_are_one_sentence(overrides, problem):
    with pytest.raises(ConfigError) as error:
        compose_config(["experiment=ladder", *overrides])
    assert problem in str(error.value)
    assert len(error.value.problems) == 1
