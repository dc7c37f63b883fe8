"""Tests of the W&B workspace; saving it requires an account."""

import re

import pytest

from hlat.tracking.metric_logger import MODEL_METRICS, extract_event_scalars, extract_scalars
from hlat.tracking.wandb_workspace import build_workspace

ROW = {
    **dict.fromkeys(MODEL_METRICS, 1.0),
    **dict.fromkeys(("tokens_per_second", "mfu", "step_seconds", "data_wait_seconds"), 1.0),
    **dict.fromkeys(("memory_bytes", "cost_usd", "cpt_usd"), 1.0),
    "step": 1,
    "tokens": 2,
    "attempt": 1,
    "time": 0.0,
    "phase": "base",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in wandb
def test_workspace_contains_all_metrics_over_their_axes() -> None:
    spec = build_workspace("somebody", "hlat")._to_model().model_dump()["spec"]
    sections = spec["section"]["panel_bank_config"]["sections"]
    panels = [panel["config"] for section in sections for panel in section["panels"]]
    axes = {panel["metrics"][0]: panel["x_axis"] for panel in panels if panel["metrics"]}
    assert {*axes} == {*extract_scalars(ROW)}
    assert {axis for key, axis in axes.items() if key.startswith("train/")} == {"tokens"}
    patterns = [panel["metric_regex"] for panel in panels if panel["metric_regex"]]
    assert all(panel["use_metric_regex"] for panel in panels if panel["metric_regex"])
    events = [
        {"event": "evaluate", "bits_per_byte": {"code": 1.0}, "loss": {"code": 2.0}},
        {"event": "score", "scores": {"arc": 0.5}},
        {"event": "ledger", "stages": [{"sources": {"code": {"tokens": 3}}}]},
    ]
    names = [name for row in events for name in extract_event_scalars(row)]
    assert [name for name in names if any(re.match(one, name) for one in patterns)] == [
        *("eval/code/bits_per_byte", "eval/arc/score", "data/tokens/code")
    ]
