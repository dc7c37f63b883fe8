"""Comparison of several runs: differing settings, results and page."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from omegaconf import DictConfig, OmegaConf

from hlat.report import __main__ as report
from hlat.report import comparison_writer
from hlat.report.comparison_writer import label_runs
from hlat.study import run_comparison
from hlat.study.run_record import load_run_record
from hlat.tracking import sweep_log as record

pytestmark = pytest.mark.usefixtures("without_png")

CONFIG = """
run: {{name: {name}, root: runs, seed: 1}}
optimizer: {{lr: {lr}, same: '${{run.seed}}'}}
data: {{root: '${{oc.env:A_SECRET}}'}}
tracking: {{wandb: {{tags: {tags}}}}}
"""


def _write_run(
    folder: Path, lr: float, loss: float, last_event: str | None = "finish", tags: str = "[]"
) -> None:
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "tokens": 512 * step,
            "loss": loss / step,
            "grad_norm": 1.0,
            "param_norm": 2.0,
            "learning_rate": lr,
            "tokens_per_second": 100.0,
            "mfu": 0.25,
            "step_seconds": 1.0,
            "data_wait_seconds": 0.0,
            "cost_usd": 1.5 * step,
            "attempt": 1,
            "time": 1000.0 + step,
        }
        for step in range(1, 5)
    ]
    rows.append(rows[-1] | {"step": 5, "tokens": 2560, "loss": loss, "time": 1005.0})
    events = [{"event": "start", "step": 0, "attempt": 1, "time": 1000.0, "began": 999.0}]
    bits = {"code": 2.0, "mean": loss / 10}
    events.append(
        {
            "event": "evaluate",
            "step": 5,
            "attempt": 1,
            "time": 1005.0,
            "bits_per_byte": bits,
            "loss": bits,
        }
    )
    events += [{"event": "spike", "step": step, "attempt": 1, "time": 1001.0} for step in (1, 3, 4)]
    if last_event is not None:
        events.append({"event": last_event, "step": 5, "attempt": 1, "time": 1006.0})
    for name, lines in (("metrics.jsonl", rows), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    (folder / "config.yaml").write_text(CONFIG.format(name=folder.name, lr=lr, tags=tags))


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("A_SECRET", "canary-5f2d9c")
    _write_run(tmp_path / "runs/a", 0.1, 10.0)
    _write_run(tmp_path / "runs/b<i>", 0.2, 8.0, last_event=None)
    (tmp_path / "runs/sweeps").mkdir()
    return tmp_path / "runs"


def test_differing_settings_are_columns(sweep: Path) -> None:
    records = run_comparison.load_run_records([sweep])
    assert run_comparison.find_config_differences(records) == {"optimizer.lr": ["0.1", "0.2"]}


def test_table_contains_the_results_of_each_run(sweep: Path) -> None:
    heads, rows = run_comparison.build_comparison_table(run_comparison.load_run_records([sweep]))
    first, second = (dict(zip(heads, row, strict=True)) for row in rows)
    assert first == {
        "Run": "a", "State": "finish", "Step": "5", "Final loss": "10.000", "Best loss": "2.500",
        "Held-out bits per byte": "1.000", "Spikes": "3", "Tokens/s, median": "100", "MFU, median": "25 %",
        "Cost (USD)": "6.00", "Goodput": first["Goodput"], "optimizer.lr": "0.1",
    }  # fmt: skip
    assert heads[0] == "Run"
    assert heads[-1] == "optimizer.lr", "results are before settings"
    assert first["Goodput"].endswith(" %")
    assert second["State"] == "running or killed"
    assert second["Best loss"] == "2.000"


def test_settings_of_a_preset_are_represented_by_its_name(tmp_path: Path) -> None:
    for name, weights, rounding in (("a", "x", 1), ("b", "y", 1), ("c", "y", 2)):
        _write_run(tmp_path / name, 0.1, 1.0)
        more = f"precision: {{name: p{weights}, weights: {weights}, rounding: {rounding}}}\n"
        with (tmp_path / name / "config.yaml").open("a") as file:
            file.write(more)
    records = run_comparison.load_run_records([tmp_path])
    assert run_comparison.find_config_differences(records) == {
        "precision.name": ["px", "py", "py"],
        "precision.rounding": ["1", "1", "2"],
    }


def test_settings_of_a_nested_preset_are_represented_by_its_name(tmp_path: Path) -> None:
    for number, (model, rules, base) in enumerate((("a", "x", 1), ("a", "y", 2), ("b", "y", 2))):
        _write_run(tmp_path / str(number), 0.1, 1.0)
        more = f"model: {{name: {model}, rules: {{name: {rules}, base: {base}}}}}\n"
        with (tmp_path / str(number) / "config.yaml").open("a") as file:
            file.write(more)
    records = run_comparison.load_run_records([tmp_path])
    assert run_comparison.find_config_differences(records) == {
        "model.name": ["a", "a", "b"],
        "model.rules.name": ["x", "y", "y"],
    }


def test_equal_settings_are_not_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    formatted = []
    format_setting = run_comparison.format_setting
    count = lambda value: formatted.append(value) or format_setting(value)  # noqa: E731
    monkeypatch.setattr(run_comparison, "format_setting", count)
    same = {f"model.k{number}": number for number in range(50)} | {"data.paths": ["a", "b"]}
    trees = [
        {**same, "optimizer.lr": lr, "a": flag, "b": 1} for lr, flag in ((1e-3, True), (2e-3, 1))
    ]
    found = run_comparison.find_differing_settings([*trees, {**trees[0], "only": None}])
    assert found == {
        "optimizer.lr": ["0.001", "0.002", "0.001"],
        "a": ["true", "1", "true"],
    }
    assert set(map(repr, formatted)) == {"0.001", "0.002", "True", "1", "None"}


def test_lists_and_missing_keys_compare(tmp_path: Path) -> None:
    _write_run(tmp_path / "a", 0.1, 1.0, tags="[x, y]")
    _write_run(tmp_path / "b", 0.1, 1.0)
    (tmp_path / "b/config.yaml").write_text("run: {seed: 1}\n")
    found = run_comparison.find_config_differences(
        run_comparison.load_run_records([tmp_path / "a", tmp_path / "b"])
    )
    assert found["tracking.wandb.tags"] == ["[x,y]", "null"]
    assert "run.seed" not in found


def test_unreadable_configuration_has_no_values(sweep: Path) -> None:
    (sweep / "a/config.yaml").write_text("optimizer: {lr: ")
    found = run_comparison.find_config_differences(run_comparison.load_run_records([sweep]))
    assert found["optimizer.lr"] == ["n/a", "0.2"]


def test_the_page_and_its_figures(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(sweep)]) == 0
    *lines, page = capsys.readouterr().out.splitlines()
    assert page == str(sweep / "comparison.html")
    assert len(lines) == 3
    assert lines[0].index("optimizer.lr") == lines[1].rindex("0.1")
    text = Path(page).read_text()
    assert "b&lt;i&gt;" in text
    assert "<i>" not in text
    assert "canary" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text)
    HTMLParser().feed(text)
    names = {file.stem for file in (sweep / "comparison").glob("*.svg")}
    assert names == {
        "loss",
        "grad_norm",
        "param_norm",
        "learning_rate",
        "heldout",
        "tokens_per_second",
    }
    for file in (sweep / "comparison").glob("*.svg"):
        label = ElementTree.parse(file).getroot().get("aria-label") or ""
        assert "a: from" in label
        assert "b<i>: from" in label
    assert report.main([str(sweep)]) == 0, "what was written is no run"


@pytest.mark.slow
def test_output_of_several_directories(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "new/place"
    folders = [str(sweep / "b<i>"), str(sweep / "a"), str(sweep)]
    assert report.main([*folders, "--output", str(out)]) == 0
    text = (out / "comparison.html").read_text()
    assert "2 runs" in text
    assert text.index(">b&lt;i&gt;</th>") < text.index(">a</th>")


@pytest.mark.slow
def test_comparison_is_written_next_to_the_first_run(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert report.main([str(sweep / "a"), str(sweep / "b<i>")]) == 0
    assert (sweep / "comparison.html").exists()
    assert not [*elsewhere.iterdir()]


def test_curves_are_labelled_by_their_settings_and_seeds_are_a_band(tmp_path: Path) -> None:
    for lr, seed in ((0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1)):
        folder = tmp_path / f"tiny-{10 * lr:04.0f}{seed:04}"
        _write_run(folder, lr, 10.0 * seed)
        folder.joinpath("config.yaml").write_text(
            f"run: {{name: {folder.name}, seed: {seed}}}\noptimizer: {{lr: {lr}}}\n"
        )
    loss, *_ = comparison_writer.build_comparison_panels(
        run_comparison.load_run_records([tmp_path])
    )
    labels = [(curve.label, curve.kind) for curve in loss.curves]
    assert labels[:2] == [("seed=1, lr=0.1", "run"), ("seed=2, lr=0.1", "run")]
    assert labels[4:] == [("lr=0.1 (3 seeds)", "band"), ("lr=0.2 (1 seed)", "band")]
    band = loss.curves[4]
    assert band.lows is not None
    assert band.highs is not None
    assert (band.lows[0], band.values[0], band.highs[0]) == (10, 20, 30)
    assert [curve.label for _, curve in loss.static_curves] == [name for name, _ in labels[4:]]


def test_directory_without_runs_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "is not a run directory and contains none" in capsys.readouterr().err


@pytest.mark.slow
def test_lengths_of_spikes_are_consecutive_logged_steps(sweep: Path) -> None:
    from hlat.report import report_writer

    record = load_run_record(sweep / "a")
    assert report_writer.count_spike_lengths(record) == {1: 1, 2: 1}
    assert (
        report_writer.format_spike_text(report_writer.count_spike_lengths(record))
        == "2 gradient spikes; 50 % lasted a single logged step, the longest 2."
    )
    assert report.main([str(sweep / "a")]) == 0
    assert (sweep / "a/figures/spikes.svg").exists()
    assert "Length of gradient spikes" in (sweep / "a/report.html").read_text()


@pytest.mark.slow
def test_seeds_of_one_point_are_aggregated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr, losses in ((0.1, (10.0, 14.0, 99.0)), (0.2, (8.0, 8.0))):
        for seed, loss in enumerate(losses, start=1):
            folder = tmp_path / f"{lr}-{seed}"
            _write_run(folder, lr, loss, last_event="finish" if seed < 3 else "diverge")
            (folder / "config.yaml").write_text(
                f"run: {{name: {folder.name}, seed: {seed}}}\noptimizer: {{lr: {lr}}}\n"
            )
    found = run_comparison.build_seed_table(run_comparison.load_run_records([tmp_path]))
    assert found is not None
    heads, rows = found
    first, second = (dict(zip(heads, row, strict=True)) for row in rows)
    assert first == {
        "optimizer.lr": "0.1", "Seeds": "3", "Final loss": "12.0000 (-13.4124 to 37.4124)", "Best loss": "3.0000 (-3.3531 to 9.3531)",
        "Held-out bits per byte": "1.2000 (-1.3412 to 3.7412)", "Spikes": "3.0 (3.0 to 3.0)", "Tokens/s": "100 (100 to 100)", "MFU": "0.2500 (0.2500 to 0.2500)",
        "Cost (USD)": "6.00 (6.00 to 6.00)", "States": "2 finish, 1 diverge",
    }  # fmt: skip
    assert second["Final loss"] == "8.0000 (8.0000 to 8.0000)"
    assert report.main([str(tmp_path)]) == 0
    assert "\nover seeds, mean and 95% interval:\noptimizer.lr  Seeds" in capsys.readouterr().out
    assert "12.0000 (-13.4124 to 37.4124)" in (tmp_path / "comparison.html").read_text()


def test_seed_table_without_seeds_is_none(sweep: Path) -> None:
    assert run_comparison.build_seed_table(run_comparison.load_run_records([sweep])) is None


@pytest.mark.slow
def test_skipped_points_are_listed_once(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep / "sweeps/x"
    for _ in range(2):
        record.log_point(folder, 0, sweep / "a", ["optimizer.lr=0.1"], {})
        record.log_skipped_point(folder, ["parallelism.tp=3"], ["3 does not divide <4>"])
    assert report.main([str(folder)]) == 0
    assert capsys.readouterr().out.count("[parallelism.tp=3] 3 does not divide <4>\n") == 1
    page = (folder / "comparison.html").read_text()
    assert page.count("<li>[parallelism.tp=3] 3 does not divide &lt;4&gt;</li>") == 1


@pytest.mark.slow
def test_cost_of_tokens_on_4_and_8_nodes(
    tmp_path: Path, compose: Callable[..., DictConfig]
) -> None:
    rates = {4: 100_000.0, 8: 160_000.0}
    for nodes, rate in rates.items():
        folder = tmp_path / f"on-{nodes}"
        _write_run(folder, 0.1, 5.0)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | {"tokens_per_second": rate}) for row in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        overrides = ("model=7b", "hardware=trn1_32xl", f"hardware.nodes={nodes}", "engine=nxd")
        config = compose(*overrides, "compiler=neuron_2_28")
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "comparison.html").read_text()
    usd = 4 * 21.5 / 3600 / 1e5 * 4e6
    assert f"100 % are {usd:.3g} USD" in page
    assert "100 % on 4 nodes, 125 % on 8 nodes" in page
    assert (tmp_path / "comparison/cost.svg").exists()


def test_runs_of_different_length_are_compared_at_common_tokens(tmp_path: Path) -> None:
    """Compare 5 steps with 3, of which the longer run has an evaluation at step 3."""
    for name, end in (("long", 5), ("short", 3)):
        _write_run(tmp_path / name, 0.1, 10.0)
        metrics, events = tmp_path / name / "metrics.jsonl", tmp_path / name / "events.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(lines[:end]))
        bits = {"mean": 1.5 if name == "long" else 2.5}
        row = {"event": "evaluate", "step": 3, "attempt": 1, "time": 9.0, "bits_per_byte": bits}
        if name == "short":  # its last evaluation has more text than one within a run
            row |= {"loop": {"bits_per_byte": bits}, "bits_per_byte": {"mean": 9.0}}
        with events.open("a") as file:
            file.write(json.dumps(row) + "\n")
    records = run_comparison.load_run_records([tmp_path])
    found = run_comparison.build_common_table(records)
    assert found is not None
    headers, rows = found
    assert headers[1:] == [
        *("Tokens trained", "Loss at 1,536 tokens", "Held-out bits per byte at 1,536 tokens"),
    ]
    assert rows == [["long", "2,560", "3.333", "1.500"], ["short", "1,536", "3.333", "2.500"]]
    assert run_comparison.build_common_table(records[:1] * 2) is None
    (tmp_path / "short/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    records = run_comparison.load_run_records([tmp_path])
    assert run_comparison.build_common_table(records) is None


def test_curves_have_the_names_that_the_user_has_chosen(tmp_path: Path) -> None:
    for name, lr in (("mine", 0.1), ("tiny-0123abcd", 0.2)):
        _write_run(tmp_path / name, lr, 10.0)
    records = run_comparison.load_run_records([tmp_path])
    assert label_runs(records) == ["mine", "lr=0.2"]


def test_labels_of_curves_do_not_contain_the_group_in_wandb(tmp_path: Path) -> None:
    names = ("tiny-0123000a", "tiny-0123000b", "tiny-0123000c")
    for name, lr, group in zip(names, (0.1, 0.2, 0.2), ("a", "b", "c"), strict=True):
        _write_run(tmp_path / name, lr, 10.0, tags=f"[], group: {group}")
    records = run_comparison.load_run_records([tmp_path])
    assert label_runs(records) == ["lr=0.1", *names[1:]]
