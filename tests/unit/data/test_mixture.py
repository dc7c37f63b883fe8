"""Weights are shares of tokens, and a timeline in tokens becomes stages in steps."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.config.batch import Batch
from hlat.config.data import Data, Source
from hlat.config.phase import Phase
from hlat.config.phase import Stage as StageConfig
from hlat.data.mixture import Stage, make_timeline

BATCH = Batch(4, 1, 32)  # 128 tokens a step


def make_data(weights: dict[str, float]) -> Data:
    return Data(name="x", sources={name: Source(["x"], w) for name, w in weights.items()})


def test_stages_end_with_the_step_that_completes_their_tokens() -> None:
    stages = [StageConfig("a", 128), StageConfig("b", 129), StageConfig("c", 1000, {"y": 2.0})]
    timeline = make_timeline(Phase("p", stages), make_data({"x": 1.0, "y": 3.0}), BATCH)
    assert [(stage.name, stage.start) for stage in timeline.stages] == [
        ("a", 0),
        ("b", 1),
        ("c", 3),
    ]
    names = [timeline.at(step).name for step in (0, 1, 2, 3, 9, 10**9)]
    assert names == ["a", "b", "b", "c", "c", "c"]
    assert timeline.stages[0].shares == (("x", 0.25), ("y", 0.75))
    assert timeline.stages[2].shares == (("y", 1.0),)


def test_order_in_the_config_does_not_matter() -> None:
    phase = Phase("p", [StageConfig("a")])
    one = make_timeline(phase, make_data({"x": 0.1, "y": 0.2, "z": 0.7}), BATCH)
    two = make_timeline(phase, make_data({"z": 0.7, "y": 0.2, "x": 0.1}), BATCH)
    assert one == two


def test_no_source_ahead_of_its_share_is_read_and_equals_go_by_name() -> None:
    stage = Stage(0, (("x", 0.5), ("y", 0.25), ("z", 0.25)), "s")
    assert stage.next_source({"x": 50, "y": 30, "z": 20, "unused": 99}, 10) == "x"
    assert stage.next_source({"x": 60, "y": 20, "z": 20}, 10) == "y"


def test_streams_begin_a_stage_spread_over_its_sources() -> None:
    stage = Stage(0, (("x", 0.5), ("y", 0.3), ("z", 0.2)), "s")
    first = [stage.first_source((stream + 0.5) / 10) for stream in range(10)]
    assert first == ["x"] * 5 + ["y"] * 3 + ["z"] * 2
    assert stage.first_source(0.9999999999999999) == "z"


shares = st.lists(st.floats(0.001, 1), min_size=1, max_size=20).map(
    lambda some: tuple((f"{i:02}", w / sum(some)) for i, w in enumerate(some))
)


@settings(max_examples=100, deadline=None)
@given(shares=shares, seed=st.integers(0, 99), shortest=st.sampled_from([1, 500, 1024]))
def test_every_source_stays_within_one_segment_of_its_share(shares, seed, shortest) -> None:
    """Taking the source that is furthest behind would leave some behind by more."""
    dice = random.Random(seed)
    stage = Stage(0, shares, "s")
    tokens = {name: 0 for name, _ in shares}
    name = stage.first_source(dice.random())
    for _ in range(500):
        tokens[name] += dice.randint(shortest, 1024)
        total = sum(tokens.values())
        assert all(abs(tokens[n] - share * total) <= 1024 for n, share in shares)
        name = stage.next_source(tokens, 1024)
