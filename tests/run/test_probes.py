"""Probes that are evaluated during training."""

import json


def test_evaluate_probes_without_changing_the_losses(runner, uninterrupted):
    rows = [
        {"context": f"{number} is", "choices": [" even", " odd"], "answer": number % 2}
        for number in range(6)
    ]
    file = runner.folder / "parity.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = runner.run("run.name=x", f"+evaluation.probes.parity={file}")
    assert done.returncode == 0, done.stderr
    assert "; accuracy parity 0." in done.stdout
    found = [row for row in runner.rows("x", "events.jsonl") if row["event"] == "evaluate"]
    assert len(found) > 1
    assert all(row["accuracy"] in ({"parity": k / 6} for k in range(7)) for row in found)
    losses = [row["loss"] for row in runner.rows("x", "metrics.jsonl")]
    assert losses == [row["loss"] for row in uninterrupted.rows("whole", "metrics.jsonl")]


def test_refuse_probes_with_zero_3(runner):
    done = runner.run("run.name=x", "+evaluation.probes.a=b.jsonl", "parallelism.zero=3")
    assert done.returncode == 2
    assert (
        "evaluation.probes=a with parallelism.zero=3 is not supported by engine=native"
        in done.stderr
    )
    assert not (runner.folder / "runs").exists()
