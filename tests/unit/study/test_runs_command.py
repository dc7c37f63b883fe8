"""`hlat runs`: list, filters, groups, comparison and export."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import csv, parquet
from scipy import stats

from hlat.config.config_errors import ConfigError
from hlat.study.__main__ import main
from hlat.study.index_file import load_run_list
from hlat.study.run_comparison import build_comparison_table, load_run_records
from hlat.study.run_filter import filter_runs

Run = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path, write_run: Run) -> Path:
    for seed in (1, 2):
        write_run(f"low-{seed}", lr=0.001, seed=seed, bits=2.0 + seed / 10)
        write_run(f"high-{seed}", lr=0.99, seed=seed, bits=1.5 + seed / 10)
    write_run("lost", lr=7.0, end="diverge")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("config.optimizer.lr=0.99 and step>=5", ["high-1", "high-2"]),
        ("config.optimizer.lr=1e-3", ["low-1", "low-2"]),
        ("state!=finish", ["lost"]),
        ("run='low-1' or run=high-2", ["high-2", "low-1"]),
        ("not (state=finish) and config.optimizer.decay_norms=false", ["lost"]),
        ("heldout_bits_per_byte < 1.65", ["high-1"]),
        ("config.optimizer.name == adamw and config.run.seed==2", ["high-2", "low-2"]),
        ("cost_usd=null", ["high-1", "high-2", "lost", "low-1", "low-2"]),
        ("host>5", []),
        ("optimizer=adamw and optimizer.lr=7", ["lost"]),
    ],
)
def test_filters(root: Path, write_run: Run, expression: str, names: list[str]) -> None:
    runs = load_run_list(root)
    for row in runs.rows:
        row["cost_usd"] = None
    assert [row["run"] for row in filter_runs(runs, expression).rows] == names


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("config.optimizer.lrr=1", "did you mean config.optimizer.lr?"),
        ("steps>1", "did you mean step?"),
        ("optmizer.lr=1", "did you mean config.optimizer.lr?"),
        ("zzz=1", "step, tokens, and config.KEY for a setting"),
        ("step>", "cannot be read; example:"),
        ("open('x')=1", "is not a comparison of a column and a value"),
        ("step+1=2", "is not a comparison"),
        ("(" * 300 + "step=1", "cannot be read"),
    ],
)
def test_invalid_filters_are_errors(root: Path, expression: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        filter_runs(load_run_list(root), expression)
    assert message in str(caught.value)


def test_branches_show_the_step_of_their_start(
    root: Path, write_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(root)]) == 0
    assert "start_step" not in capsys.readouterr().out
    branch = write_run("branch", end=None)
    events = (branch / "events.jsonl").read_text()
    (branch / "events.jsonl").write_text(
        events.replace('"event": "start", "step": 0', '"event": "resume", "step": 3')
    )
    assert main([str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "state", "start_step", "step"]
    assert lines[1].split()[-7:-5] == ["3", "5"]
    assert lines[2].split()[:4] == ["high-1", "finish", "n/a", "5"]
    headers, rows = build_comparison_table(load_run_records([branch, root / "high-1"]))
    assert [row[headers.index("Start step")] for row in rows] == ["3", "n/a"]


def test_the_list_has_columns_and_a_count(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root), "where=state=finish", "columns=config.optimizer.lr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "config.optimizer.lr"
    assert lines[1].startswith("high-1  finish  5")
    assert lines[-1] == f"4 of 5 runs in {root}"
    assert main([str(root), "where=state=finished"]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith(f"0 of 5 runs in {root}\n")
    assert shown.err == "no run matches; values of all runs:\nstate: diverge, finish\n"
    assert main([str(root), "columns=lr"]) == 2
    assert "did you mean config.optimizer.lr" in capsys.readouterr().err


def test_groups_have_means_with_intervals(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root), "group=optimizer.lr", "columns=best_loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:3] == ["0.99", "2", "finish"]
    assert "1.6500 (1.0147 to 2.2853)" in lines[2]
    assert lines[2].endswith("  3.0000 (3.0000 to 3.0000)")
    assert "1 diverge" in lines[3]
    assert lines[0].split()[-1] == "best_loss"


def test_comparison_lists_differing_settings(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provenance = root / "high-1/provenance.json"
    provenance.write_text(json.dumps({"git_revision": "def", "data": {"x": 2}}))
    assert main([str(root), "compare=low-1,high-1"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["differs"] == ["low-1", "high-1"]
    assert rows["code"] == ["abc", "def"]
    assert rows["config.optimizer.lr"] == ["0.001", "0.99"]
    assert rows.keys() == {
        "differs",
        "code",
        "data",
        "host",
        "config.optimizer.lr",
        "config.run.name",
    }
    assert main([str(root), "compare=low-1,nothing"]) == 2
    assert "has no run nothing" in capsys.readouterr().err
    assert main([str(root), "compare=low-1,lows-2"]) == 2
    assert "has no run lows-2; did you mean low-2?" in capsys.readouterr().err


def test_a_comparison_contains_the_error_of_the_heldout_text(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bits of two documents differ by 60 or 20 from each other, so the error is 40 / 200."""

    def write(name: str, difference: float, text: str) -> None:
        cluster = {"bits": [150 + difference / 2, 150 - difference / 2], "bytes": [100, 100]}
        path = root / name / "events.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[1] |= {"clusters": {"code": cluster}, "text": text}
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    for seed in (1, 2):
        write(f"low-{seed}", 60, "x")
        write(f"high-{seed}", 20, "x")
    arguments = [str(root), "compare=optimizer.lr", "where=optimizer.lr<5"]
    assert main(arguments) == 0
    _, headers, line = capsys.readouterr().out.splitlines()
    assert line[headers.index("SE of the text") :].startswith("0.2000 ")
    write("low-2", 60, "y")
    assert main(arguments) == 0
    assert "WARNING: the runs were evaluated on different" in capsys.readouterr().out


def test_values_of_a_setting_are_compared_by_seed(
    root: Path, write_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("high-3", lr=0.99, seed=3, bits=1.9)
    write_run("low-3", lr=0.001, seed=3, bits=2.3)
    assert main([str(root), "compare=optimizer.lr", "where=optimizer.lr<5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "heldout_bits_per_byte, lower is better; paired by seed"
    assert lines[2].startswith("optimizer.lr=0.99 - optimizer.lr=0.001  3      -0.4667")
    p_value = stats.ttest_rel([1.6, 1.7, 1.9], [2.1, 2.2, 2.3]).pvalue
    assert f"  {p_value:.2g}  " in lines[2]
    assert lines[2].endswith("better")
    assert main([str(root), "compare=optimizer"]) == 2
    assert "all runs have the value adamw" in capsys.readouterr().err
    assert main([str(root), "compare=run.seed"]) == 2
    assert "runs are paired by seed" in capsys.readouterr().err
    settings = json.loads((root / "low-1/config.yaml").read_text())
    settings["optimizer"]["decay_norms"] = True
    (root / "low-1/config.yaml").write_text(json.dumps(settings))
    assert main([str(root), "compare=optimizer.lr", "where=run=low-1 or run=high-1"]) == 2
    assert "otherwise equal; they also differ in optimizer.decay" in capsys.readouterr().err
    assert main([str(root), "compare=step"]) == 2
    assert "compare=step is a result" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_exported_files_are_readable(root: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"runs.{suffix}"
    assert main([str(root), f"export={file}", "where=config.run.seed=1"]) == 0
    table = csv.read_csv(file) if suffix == "csv" else parquet.read_table(file)
    assert table["run"].to_pylist() == ["high-1", "lost", "low-1"]
    assert table["config.optimizer.lr"].to_pylist() == [0.99, 7.0, 0.001]
