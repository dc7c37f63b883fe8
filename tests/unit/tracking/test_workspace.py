"""The layout for W&B, as its library builds it; saving needs an account."""

import re

import pytest

from hlat.tracking.listener import LEARNING, event_scalars, scalars
from hlat.tracking.workspace import workspace

ROW = {
    **dict.fromkeys(LEARNING, 1.0),
    **dict.fromkeys(("tokens_per_second", "mfu", "step_seconds", "data_wait_seconds"), 1.0),
    **dict.fromkeys(("memory_bytes", "cost_usd", "cpt_usd"), 1.0),
    "step": 1,
    "tokens": 2,
    "attempt": 1,
    "time": 0.0,
    "phase": "base",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own
def test_it_shows_what_the_service_is_told_over_its_own_axes() -> None:
    spec = workspace("somebody", "hlat")._to_model().model_dump()["spec"]
    sections = spec["section"]["panel_bank_config"]["sections"]
    panels = [panel["config"] for section in sections for panel in section["panels"]]
    shown = {panel["metrics"][0]: panel["x_axis"] for panel in panels if panel["metrics"]}
    assert {*shown} == {*scalars(ROW)}
    assert {axis for key, axis in shown.items() if key.startswith("train/")} == {"tokens"}
    found = [panel["metric_regex"] for panel in panels if panel["metric_regex"]]
    assert all(panel["use_metric_regex"] for panel in panels if panel["metric_regex"])
    told = [
        {"event": "evaluate", "bits_per_byte": {"code": 1.0}, "loss": {"code": 2.0}},
        {"event": "ledger", "stages": [{"sources": {"code": {"tokens": 3}}}]},
    ]
    names = [name for row in told for name in event_scalars(row)]
    assert [name for name in names if any(re.match(one, name) for one in found)] == [
        *("heldout/bits_per_byte/code", "data/tokens/code")
    ]
