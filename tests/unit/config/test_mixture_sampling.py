"""Random mixtures of a sweep: moments of the distribution, limits and invalid settings."""

import numpy as np
import pytest

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.mixture_sampling import (
    compute_weight_limits,
    round_proportions,
    sample_mixtures,
)
from hlat.config.phase_steps import compute_stage_starts
from hlat.config.resolve import convert_to_dataclasses, resolve_config
from hlat.config.sweep_axes import is_sweep, load_sweep_axes


def sample(*overrides):
    config = convert_to_dataclasses(compose_config(["study.mixture.num_mixtures=8", *overrides]))
    return sample_mixtures(config)


def test_mixtures_are_an_axis_whose_points_have_the_sampled_weights():
    words = ["study.mixture.num_mixtures=4", "run.seed=1,2"]
    sweep = load_sweep_axes(words)
    values = sweep.axes["phase.timeline"]
    assert len(values) == 4
    assert is_sweep(["study.mixture.num_mixtures=4"])
    config = resolve_config(compose_config([f"phase.timeline={values[2]}"]))
    assert config.phase.timeline[0].weights == sample()[2].weights


def test_base_is_the_run_without_a_study():
    value = load_sweep_axes(["study.mixture.num_mixtures=2"]).axes["phase.timeline"][0]
    names = [resolve_config(compose_config(w)).run.name for w in ([], [f"phase.timeline={value}"])]
    assert names[0] == names[1]


def test_more_mixtures_begin_with_the_same_ones():
    assert sample("study.mixture.num_mixtures=12")[:8] == sample()
    assert sample("study.mixture.seed=1")[1:] != sample()[1:]


def test_mixtures_have_the_moments_of_the_dirichlet_distribution():
    """Mean p and variance p (1 - p) / (strength + 1), with four standard errors."""
    fixed = ["study.mixture.min_strength=5", "study.mixture.max_strength=5"]
    mixtures = sample(*fixed, "study.mixture.num_mixtures=4001")[1:]
    weights = np.array(
        [[mixture.weights[name] for name in ("code", "prose", "data")] for mixture in mixtures]
    )
    base = np.array([0.5, 0.3, 0.2])
    variance = base * (1 - base) / 6
    np.testing.assert_allclose(weights.mean(0), base, atol=4 * np.sqrt(variance.max() / 4000))
    np.testing.assert_allclose(weights.var(0), variance, rtol=0.1)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-9)


def test_repetition_is_limited():
    """256 steps of 2,048 tokens and 100,000 tokens per epoch: at most 2 x 100,000 / 524,288."""
    mixtures = sample(
        "study.mixture.max_epochs=2",
        "+study.mixture.tokens_per_epoch.prose=100000",
        "study.mixture.num_mixtures=40",
    )
    weights = [mixture.weights["prose"] for mixture in mixtures[1:]]
    assert 0.3 < max(weights) <= 2 * 100_000 / 524_288
    limits = compute_weight_limits(("a", "b"), {"a": 50.0}, 4, 1000)
    assert limits == {"a": 0.2, "b": 1.0}


def test_rounding_keeps_the_sum():
    assert round_proportions([1 / 3, 1 / 3, 1 / 3]) == [0.334, 0.333, 0.333]
    assert round_proportions([0.9996, 0.0004]) == [1.0, 0.0]


LAST_PHASE = ("study.mixture.min_start=0.5", "study.mixture.max_start=0.9")


def test_last_phases_follow_the_base_weights():
    """A run has 256 steps of 2,048 tokens."""
    words = ["study.mixture.num_mixtures=5", *LAST_PHASE]
    first, *others = load_sweep_axes(words).axes["phase.timeline"]
    assert first == "[{name:base}]"
    for text, mixture in zip(others, sample(*LAST_PHASE)[1:5], strict=True):
        config = resolve_config(compose_config([f"phase.timeline={text}"]))
        stages = config.phase.timeline
        assert (stages[0].weights, stages[1].weights) == (None, mixture.weights)
        assert stages[0].tokens == round(256 * mixture.start) * 2048
        assert compute_stage_starts(config.phase, config.batch)[1] == round(256 * mixture.start)


def test_starts_are_uniform_and_weights_around_those_of_the_last_stage():
    words = ["phase=upsampled", "study.mixture.min_strength=9", "study.mixture.max_strength=9"]
    mixtures = sample(*LAST_PHASE, *words, "study.mixture.num_mixtures=2001")[1:]
    starts = np.array([mixture.start for mixture in mixtures])
    assert 0.5 <= starts.min() < 0.51 < 0.89 < starts.max() <= 0.9
    np.testing.assert_allclose(starts.mean(), 0.7, atol=4 * 0.4 / np.sqrt(12 * 2000))
    prose = np.array([mixture.weights["prose"] for mixture in mixtures])
    np.testing.assert_allclose(prose.mean(), 0.3547, atol=4 * 0.16 / np.sqrt(2000))


def test_source_of_the_last_phase_alone_is_varied():
    words = [*LAST_PHASE, "phase=upsampled", "data.sources.data.weight=0"]
    assert all(mixture.weights["data"] > 0 for mixture in sample(*words)[1:])


def test_source_that_the_last_phase_omits_stays_absent():
    words = [*LAST_PHASE, "phase=upsampled", "phase.timeline.1.weights.prose=0"]
    assert all(mixture.weights["prose"] == 0 for mixture in sample(*words)[1:])


def test_repetition_of_last_phases_is_limited_over_the_run():
    words = ["study.mixture.max_epochs=2", "+study.mixture.tokens_per_epoch.prose=100000"]
    mixtures = sample(*LAST_PHASE, *words, "study.mixture.num_mixtures=40")[1:]
    shares = [0.3 * m.start + (1 - m.start) * m.weights["prose"] for m in mixtures]
    assert 0.36 < max(shares) <= 2 * 100_000 / 524_288
    assert max(m.weights["prose"] for m in mixtures) > 0.4


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.sources.code.weight=0"], "data.sources.code.weight=0 is never varied"),
        (["~data.sources.code", "~data.sources.prose"], "has the only source data; add another"),
        (["phase=upsampled"], "phase=upsampled has stages of its own; use phase=base, or set"),
        (LAST_PHASE[:1], "study.mixture.max_start is null"),
        (["study.mixture.min_start=0.9", "study.mixture.max_start=0.5"], "above study.mixture.max"),
        (["study.mixture.min_start=0", "study.mixture.max_start=0.5"], "is outside (0, 1)"),
        (
            [*LAST_PHASE, "phase.timeline=[{name:a,tokens:40960,weights:{code:1}},{name:b}]"],
            "the first has the weights of data.sources, and phase=base has other ones",
        ),
        (["+study.mixture.tokens_per_epoch.cod=10"], "there is no such source; use code, prose"),
        (["+study.mixture.tokens_per_epoch.code=10000"], "read data.sources.code 26.2 times"),
        (["study.mixture.min_strength=20"], "is above study.mixture.max_strength=10"),
        (["study.mixture.num_mixtures=1"], "num_mixtures=1 is outside [2, 100000]"),
        (
            [
                "+study.mixture.tokens_per_epoch.code=65600",
                "+study.mixture.tokens_per_epoch.prose=39400",
                "+study.mixture.tokens_per_epoch.data=26300",
            ],
            "distinct mixtures with at most max_epochs=4; raise max_epochs",
        ),
    ],
)
def test_invalid_settings_are_one_sentence(overrides, problem):
    with pytest.raises(ConfigError) as error:
        sample(*overrides)
    assert problem in str(error.value)
    assert len(error.value.problems) == 1


def test_sources_and_mixtures_are_not_both_axes():
    with pytest.raises(ConfigError, match="start one sweep per phase"):
        load_sweep_axes(["study.mixture.num_mixtures=4", "phase=base,upsampled"])
