"""Columns and events of a run are listed in hlat/tracking/metric_definitions.yaml."""

import json
from pathlib import Path

import yaml

import hlat.tracking

DEFINITIONS = yaml.safe_load(
    (Path(hlat.tracking.__file__).parent / "metric_definitions.yaml").read_text()
)


def test_rows_and_events_of_a_run_are_listed(runner_at_step_10) -> None:
    run = runner_at_step_10.run(
        "run.name=x", "run.steps=12", "tracking.metrics_every=1", "tracking.diagnostics=true"
    )
    assert run.returncode == 0, run.stderr
    (directory,) = runner_at_step_10.folder.glob("runs/x")
    rows, events = (
        [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    expected = [n for n in DEFINITIONS["metrics"] if not n.startswith(("neuron", "router"))]
    assert list(rows[-1]) == expected
    for row in rows:  # those before the resume have no diagnostics
        assert list(row) == [name for name in expected if name in row]
    assert {"start", "ready", "evaluate", "ledger", "checkpoint", "resume", "finish"} <= {
        event["event"] for event in events
    }
    for event in events:
        fields = set(event) - {"event", "step", "attempt", "time"}
        assert fields <= set(DEFINITIONS["events"][event["event"]].get("fields", {})), event
