"""Test token proportions, and the conversion of a timeline to steps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig, SourceConfig
from hlat.config.phase import PhaseConfig
from hlat.config.phase import PhaseStage as PhaseStage
from hlat.data.data_mixture import MixtureStage, build_mixture_schedule

BATCH = BatchConfig(4, 1, 32)  # 128 tokens a step


def make_data(weights: dict[str, float]) -> DataConfig:
    return DataConfig(
        name="x", sources={name: SourceConfig(["x"], w) for name, w in weights.items()}
    )


def test_stages_end_with_the_step_that_completes_their_tokens() -> None:
    stages = [PhaseStage("a", 128), PhaseStage("b", 129), PhaseStage("c", 1000, {"y": 2.0})]
    timeline = build_mixture_schedule(
        PhaseConfig("p", stages), make_data({"x": 1.0, "y": 3.0}), BATCH
    )
    assert [(stage.name, stage.start_step) for stage in timeline.stages] == [
        ("a", 0),
        ("b", 1),
        ("c", 3),
    ]
    names = [timeline.get_stage(step).name for step in (0, 1, 2, 3, 9, 10**9)]
    assert names == ["a", "b", "b", "c", "c", "c"]
    assert timeline.stages[0].proportions == (("x", 0.25), ("y", 0.75))
    assert timeline.stages[2].proportions == (("y", 1.0),)


def test_order_in_the_config_has_no_effect() -> None:
    phase = PhaseConfig("p", [PhaseStage("a")])
    one = build_mixture_schedule(phase, make_data({"x": 0.1, "y": 0.2, "z": 0.7}), BATCH)
    two = build_mixture_schedule(phase, make_data({"z": 0.7, "y": 0.2, "x": 0.1}), BATCH)
    assert one == two


def test_source_behind_its_weight_is_selected_with_ties_broken_by_name() -> None:
    stage = MixtureStage(0, (("x", 0.5), ("y", 0.25), ("z", 0.25)), "s")
    assert stage.select_next_source({"x": 50, "y": 30, "z": 20, "unused": 99}, 10) == "x"
    assert stage.select_next_source({"x": 60, "y": 20, "z": 20}, 10) == "y"


def test_first_sources_of_streams_are_proportional_to_the_weights() -> None:
    stage = MixtureStage(0, (("x", 0.5), ("y", 0.3), ("z", 0.2)), "s")
    first = [stage.select_first_source((stream + 0.5) / 10) for stream in range(10)]
    assert first == ["x"] * 5 + ["y"] * 3 + ["z"] * 2
    assert stage.select_first_source(0.9999999999999999) == "z"


shares = st.lists(st.floats(0.001, 1), min_size=1, max_size=20).map(
    lambda some: tuple((f"{i:02}", w / sum(some)) for i, w in enumerate(some))
)


@settings(max_examples=100)
@given(shares=shares, seed=st.integers(0, 99), shortest=st.sampled_from([1, 500, 1024]))
@pytest.mark.slow
def test_tokens_of_sources_deviate_by_at_most_one_segment(shares, seed, shortest) -> None:
    """Selecting the source with the largest deficit would exceed one segment."""
    rng = random.Random(seed)
    stage = MixtureStage(0, shares, "s")
    tokens = {name: 0 for name, _ in shares}
    name = stage.select_first_source(rng.random())
    for _ in range(500):
        tokens[name] += rng.randint(shortest, 1024)
        total = sum(tokens.values())
        assert all(abs(tokens[n] - share * total) <= 1024 for n, share in shares)
        name = stage.select_next_source(tokens, 1024)
