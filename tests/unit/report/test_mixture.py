"""`hlat mixture`: runs, files, page and figure, proposal as a phase, and wrong input."""

import csv
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from hlat.config.compose import compose_config
from hlat.config.sweep_axes import load_sweep_axes
from hlat.report.mixture import main
from tests.unit.study.mixture_data import build_points, compute_losses
from tests.unit.study.scaling_data import write_run

FAST = ["samples=5", "form=log_linear"]


def write_runs(root: Path, num_mixtures: int = 9, *overrides: str) -> None:
    """Write finished runs of sampled mixtures of data=python with log-linear losses."""
    words = ["model=tiny", f"study.mixture.num_mixtures={num_mixtures}", *overrides]
    timelines = load_sweep_axes(words).axes["phase.timeline"]
    for index, timeline in enumerate(timelines):
        config = compose_config([*words, f"phase.timeline={timeline}", "run.name=x"])
        base = {"code": 0.5, "prose": 0.3, "data": 0.2}
        weights = config.phase.timeline[-1].weights or base
        start = (config.phase.timeline[0].tokens or 0) / 10**6
        shares = {name: start * base[name] + (1 - start) * weights[name] for name in base}
        mixture = np.array([[shares[name] for name in ("code", "data", "prose")]])
        code, data = compute_losses(mixture)[0].tolist()
        run_dir = root / f"m{index}"
        write_run(run_dir, OmegaConf.to_yaml(config), 10**6, code, 0.5)
        events = (run_dir / "events.jsonl").read_text()
        losses = f'"code": {code}, "data": {data}, "mean": {(code + data) / 2}'
        events = events.replace(f'"text": {code}, "mean": {code}', losses)
        sources = {name: {"tokens": 400, "epochs": 0.001} for name in ("code", "data", "prose")}
        old = json.dumps({"text": {"tokens": 10**6, "epochs": 0.5}})
        assert old in events
        (run_dir / "events.jsonl").write_text(events.replace(old, json.dumps(sources)))
        typed = ["model=tiny", "run.seed=1", f"phase.timeline={timeline}", "+sweep=mixture"]
        (run_dir / "overrides.yaml").write_text("".join(f"- {json.dumps(t)}\n" for t in typed))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixture") / "runs"
    write_runs(root)
    return root


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return the settings that name two files of 20 mixtures."""
    points = build_points(20)
    for name, columns, table in (
        ("weights", points.sources, points.weights),
        ("losses", points.domains, points.losses),
    ):
        with open(tmp_path / f"{name}.csv", "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["index", *columns])
            writer.writerows([[i, *row] for i, row in enumerate(table.tolist())])
    return [f"data={tmp_path}/weights.csv", f"losses={tmp_path}/losses.csv"]


def test_runs_are_fitted_and_the_proposal_is_a_phase(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(root), *FAST, f"output={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"9 mixtures of 3 sources in 9 models of {root}\n")
    *_, command = shlex.split(text.splitlines()[-1]), text.splitlines()[-1]
    assert command == f"hlat sweep --config-dir {tmp_path} +sweep=mixture_proposal model=tiny"
    monkeypatch.setattr("sys.argv", ["hlat", "--config-dir", str(tmp_path)])
    config = compose_config(["phase=mixture_proposal"])
    weights = config.phase.timeline[0].weights
    assert sum(weights.values()) == pytest.approx(1)
    figure = (tmp_path / "mixtures.svg").read_text()
    assert "proportion of tokens" in figure
    assert "Mixtures in parallel coordinates" in (tmp_path / "mixture.html").read_text()
    rows = [*csv.DictReader((tmp_path / "mixtures.csv").read_text().splitlines())]
    assert len(rows) == 9 + 2
    assert float(rows[-1]["weight.code"]) == pytest.approx(weights["code"])
    base = next(row for row in rows if row["weight.code"] == "0.5" and row["point"].endswith("m0"))
    assert float(base["loss.code"]) == pytest.approx(
        compute_losses(np.array([[0.5, 0.2, 0.3]]))[0, 0]
    )


def test_runs_with_a_last_phase_are_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has 10^6 tokens, of which the sampled stages are the last."""
    steps = ["schedule.total_steps=500", "batch.global_batch_size=16", "batch.sequence_length=125"]
    words = ["study.mixture.min_start=0.3", "study.mixture.max_start=0.9", *steps]
    write_runs(tmp_path / "runs", 14, *words, "schedule.warmup_steps=1")
    output = tmp_path / "out"
    assert main([str(tmp_path / "runs"), *FAST, f"output={output}", "json=true"]) == 0
    text = capsys.readouterr().out
    proposal = json.loads(text)["proposal"]
    assert 0.3 <= proposal["start"] <= 0.9
    assert proposal["starts"] == pytest.approx([0.3, 0.9], abs=0.15)
    monkeypatch.setattr("sys.argv", ["hlat", "--config-dir", str(output)])
    stages = compose_config(["phase=mixture_proposal"]).phase.timeline
    assert stages[0].tokens == round(proposal["start"] * 1e6)
    assert stages[1].weights == pytest.approx(proposal["weights"])
    rows = [*csv.DictReader((output / "mixtures.csv").read_text().splitlines())]
    assert float(rows[0]["start"]) == 1
    assert float(rows[-1]["start"]) == proposal["start"]
    assert "proportion of tokens of the last phase" in (output / "mixtures.svg").read_text()
    assert "is for a last phase after" in (output / "mixture.html").read_text()


def test_epochs_of_the_ledger_limit_the_proposal(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledgers have 400 tokens in 0.001 epochs, and the runs a million tokens."""
    assert main([str(root), *FAST, "target=code:1", "max_epochs=1.25", "json=true"]) == 0
    proposal = json.loads(capsys.readouterr().out)["proposal"]
    assert proposal["limits"] == pytest.approx(dict.fromkeys(("code", "prose", "data"), 0.5))
    assert max(proposal["weights"].values()) <= 0.5
    assert main([str(root), *FAST, "tokens=2e6", "max_epochs=1.25", "json=true"]) == 2
    assert "no sampled mixture reads every source at most" in capsys.readouterr().err


def test_files_are_fitted(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, *FAST, "target=code:1", "json=true"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["target"] == {"code": 1, "data": 0}
    errors = {each["form"]: each["errors"]["code"] for each in summary["errors"]}
    assert errors["log_linear"] < 1e-5 < errors["linear"] < errors[None]
    assert summary["proposal"]["gain"]["value"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either roots of runs, such as runs, or data=FILE.csv"),
        (
            ["{root}", "losses=x.csv"],
            "data= and losses= are two files of the same points; give both",
        ),
        (["data={weights}"], "data= and losses= are two files of the same points; give both"),
        (["data={weights}", "losses={losses}", "where=x=1"], "where= selects runs"),
        (["data={weights}", "losses={empty}"], "has the only column index; give one column"),
        (["data={weights}", "losses={other}"], "have no name of their first columns in common"),
        (
            ["data={weights}", "losses={bad}"],
            "line 2: code=nan is not a finite number that is above",
        ),
        (["{root}", "where=state=diverge"], "has no finished runs with state=diverge"),
        (["{root}/m0"], "has 1 mixtures of 3 sources; train at least 8"),
        (["{root}", "target=code"], "target: code is not a name with a weight, such as code:2"),
        (["{root}", "form=tree"], "form: invalid choice"),
        (["{root}", "max_epoch=2"], "did you mean max_epochs=?"),
    ],
)
def test_wrong_input_is_one_sentence(
    root: Path,
    files: list[str],
    tmp_path: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = dict(pair.split("=") for pair in files)
    names = {"weights": names["data"], "losses": names["losses"], "root": str(root)}
    for name, text in (("empty", "index\n1\n"), ("other", "index,code\nx,1\n")):
        (tmp_path / f"{name}.csv").write_text(text)
        names[name] = str(tmp_path / f"{name}.csv")
    (tmp_path / "bad.csv").write_text("index,code\n1,nan\n")
    names["bad"] = str(tmp_path / "bad.csv")
    try:
        code = main([*[word.format(**names) for word in words], *FAST[:1]])
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_runs_that_cannot_be_compared_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path / "runs")
    config = tmp_path / "runs/m3/config.yaml"
    config.write_text(config.read_text().replace("hidden_size: 128", "hidden_size: 64"))
    assert main([str(tmp_path / "runs"), *FAST]) == 2
    message = "the runs differ in model.hidden_size (64, 128); a regression on mixtures needs"
    assert message in capsys.readouterr().err
    config.write_text(config.read_text().replace("hidden_size: 64", "hidden_size: 128"))
    events = tmp_path / "runs/m4/events.jsonl"
    recorded = events.read_text()
    events.write_text(recorded.replace('"code": ', '"codes": ', 1))
    assert main([str(tmp_path / "runs"), *FAST]) == 2
    assert "m0 has no heldout_bits_per_byte.codes, as other runs" in capsys.readouterr().err
    events.write_text(recorded.replace('"code": ', '"code": -', 1))
    assert main([str(tmp_path / "runs"), *FAST]) == 2
    assert "is not a number above 0; omit the run with where=" in capsys.readouterr().err


def test_runs_with_other_heldout_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path / "runs")
    config = tmp_path / "runs/m3/config.yaml"
    text = config.read_text()
    assert "tokens_per_source: 65536" in text
    config.write_text(text.replace("tokens_per_source: 65536", "tokens_per_source: 32768"))
    assert main([str(tmp_path / "runs"), *FAST]) == 2
    message = "the runs differ in evaluation.tokens_per_source (32768, 65536)"
    assert message in capsys.readouterr().err
