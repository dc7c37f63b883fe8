"""Reason why the configured layout is not the first one of a search."""

from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from hlat.plan import search_text
from hlat.plan.configured_layout import evaluate_layout, explain_configured
from hlat.plan.layout_search import find_layout_problems, search_layouts
from hlat.plan.memory_estimate import estimate_memory
from hlat.plan.step_time import predict_step_time

RUN = ("model=llama3_8b", "hardware=h100_p5")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


@pytest.fixture
def explain(config):
    """Return the explanation, the configured run and the first layout."""

    def explain(*overrides):
        run = config(*overrides)
        layouts = search_layouts(run)
        own = explain_configured(run, find_layout_problems(run), layouts)
        return own.explanation, run, layouts[0]

    return explain


@pytest.mark.slow
def test_a_slower_layout_has_the_part_that_takes_most_of_the_difference(explain):
    text, run, first = explain(*RUN, "parallelism.activation_checkpointing=full")
    own, best = (asdict(predict_step_time(one)) for one in (run, first.config))
    slower = predict_step_time(run).total / first.step_s - 1
    assert text.startswith(f"the configured layout is {slower:.1%} slower than the first one: ")
    excess = {name: own[name] - best[name] for name in own if name != "hidden"}
    assert max(excess, key=excess.get) == "reduction"
    assert f": {own['reduction']:.3g} s of data-parallel collectives a step, " in text
    assert text.endswith(f"{best['reduction']:.3g} s in the first")


@pytest.mark.slow
def test_a_layout_within_the_interval_is_equal(explain):
    """The interval of layouts on H100 is a factor of 0.934 to 1.071."""
    layout = ("parallelism.zero=1", "parallelism.tp=2", "parallelism.sequence_parallel=true")
    text, run, first = explain(*RUN, *layout)
    slower = predict_step_time(run).total / first.step_s - 1
    assert 0 < slower < 1.071 / 0.934 - 1
    assert text.startswith(f"the configured layout is {slower:.1%} slower than the first one: ")
    assert text.endswith(". The intervals of both overlap: measure both")


@pytest.mark.slow
def test_the_first_layout_is_the_first(explain, config):
    *_, first = explain(*RUN)
    assert explain(*RUN, *first.overrides)[0] == "the configured layout is as fast as the first one"


def test_a_layout_that_does_not_fit_has_the_term_with_the_largest_excess(explain):
    run = ("model=7b", "hardware=trn1_32xl", "hardware.nodes=4")
    text, own, first = explain(*run, "parallelism.tp=2", "parallelism.zero=0")
    terms, others = asdict(estimate_memory(own)), asdict(first.memory)
    name = max(terms, key=lambda one: terms[one] - others[one])
    assert name == "optimizer_state"
    gib = 2**30
    assert text == (
        f"the configured layout does not fit: it needs {sum(terms.values()) / gib:.2f} GiB of each "
        f"NeuronCore, which has 16.00; optimizer state {terms[name] / gib:.2f} GiB, {others[name] / gib:.2f} "
        "in the first layout"
    )


def test_an_invalid_layout_has_the_rule(explain):
    text, *_ = explain("model=7b", "hardware=trn1_32xl", "parallelism.tp=6")
    assert text.startswith(
        "the configured layout is invalid: parallelism.tp=6 does not divide model.num_attention_heads=32; use"
    )


def test_unknown_step_times_and_runs_that_never_fit(explain, config):
    text, *_ = explain("parallelism.dp=2")
    assert text.startswith("the configured layout fits, with 0.")
    assert text.endswith("; its step time is unknown")
    run = config("model=70b", "hardware=trn1_32xl", "precision=mixed", "parallelism.pp=1")
    layouts = search_layouts(run)
    own = explain_configured(run, [], layouts)
    assert own.explanation.startswith("the configured layout does not fit: it needs ")
    assert "in the first" not in own.explanation
    lines = search_text.format_search(run, layouts, own)
    assert "none fits; least memory first:" in lines
    least = min(layout.memory.total for layout in layouts) / 2**30
    assert f" {least:.2f} " in lines[lines.index("none fits; least memory first:") + 3]


def test_configured_layout_is_a_row_of_the_table(config):
    run = config(*RUN, "hardware.nodes=2", "parallelism.tp=8", "parallelism.pp=2")
    own = explain_configured(run, [], layouts := search_layouts(run))
    assert own.candidate == evaluate_layout(run)
    (row,) = (
        one for one in search_text.format_search(run, layouts, own) if one.endswith("  configured")
    )
    assert row.split()[:4] == ["2", "8", "2", "1"]
    summary = search_text.summarize_search(layouts, own)
    assert summary["configured"]["layout"]["step_seconds"] == predict_step_time(run).total
    assert summary["layouts"][0]["equal_to_first"]
