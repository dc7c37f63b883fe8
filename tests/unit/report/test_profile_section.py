"""Recorded steps in the report: shares by class, and links to their files."""

import json
import re
from typing import Any

import pytest

from hlat.engine.step_account import TIME_CLASSES
from hlat.report.profile_section import (
    MAX_PROFILES,
    build_profile_figure,
    build_profile_table,
    read_profiles,
)
from hlat.report.report_writer import render_report, write_report
from hlat.study.run_record import load_run_record
from tests.unit.report.test_report_writer import make_run

SECONDS = {"matmuls": 0.06, "attention": 0.02, "python": 0.02}


def write_account(run_dir, name: str, classes: Any = None, **fields: Any) -> None:
    account = {"classes": SECONDS if classes is None else classes, "clock": "host", **fields}
    (run_dir / "profiles").mkdir(exist_ok=True)
    (run_dir / f"profiles/{name}_account.json").write_text(json.dumps(account))


@pytest.mark.usefixtures("without_png")
def test_the_report_has_figure_table_and_links(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_account(run_dir, "step_20_rank_0")
    write_account(run_dir, "step_20_rank_1", has_memory_snapshot=True)
    page = write_report(run_dir).read_text()
    assert "<h2>Profiles</h2>" in page
    for name, ends in {"step_20_rank_0": "", "step_20_rank_1": "_memory.pickle"}.items():
        for end in (
            ".json.gz",
            "_operators.csv",
            "_modules.csv",
            "_account.json",
            ends or ".json.gz",
        ):
            assert f'<a href="profiles/{name}{end}">profiles/{name}{end}</a>' in page
    assert 'href="profiles/step_20_rank_0_memory.pickle"' not in page
    assert (
        "Time of step 20, rank 1 by class of work: matmuls 60 %, attention 20 %, python 20 %."
    ) in page
    assert (run_dir / "figures/profile.svg").is_file()


def test_a_served_page_has_no_links(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_account(run_dir, "step_3_rank_0")
    page = render_report(load_run_record(run_dir))
    assert "profiles/step_3_rank_0.json.gz" in page
    assert 'href="profiles' not in page


def test_the_table_has_all_classes_and_the_sum(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_account(run_dir, "step_3_rank_0")
    write_account(run_dir, "step_4_rank_0", {**SECONDS, "loss": 0.1})
    headers, rows = build_profile_table(read_profiles(load_run_record(run_dir)))
    assert headers[:3] == ["Class", "step 3, rank 0, ms", "Share"]
    assert [row[0] for row in rows] == [*(label for label, _ in TIME_CLASSES.values()), "Step"]
    assert rows[0][1:5] == ("60.000", "60.000 %", "60.000", "30.000 %")
    assert rows[-1][1:5] == ("100.000", "100 %", "200.000", "100 %")
    assert all(len(row) == len(headers) for row in rows)


@pytest.mark.parametrize(
    "classes",
    [[], "text", {}, {"matmuls": "1"}, {"matmuls": -1.0}, {"matmuls": None}, {"matmuls": 0.0}],
)
def test_damaged_accounts_are_omitted(tmp_path, classes: Any) -> None:
    run_dir = make_run(tmp_path / "run")
    write_account(run_dir, "step_3_rank_0", classes)
    assert read_profiles(load_run_record(run_dir)) == []
    assert "<h2>Profiles</h2>" not in render_report(load_run_record(run_dir))


def test_the_last_profiles_are_shown(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    for step in range(1, MAX_PROFILES + 3):
        write_account(run_dir, f"step_{step}_rank_0")
    profiles = read_profiles(load_run_record(run_dir))
    assert [one.label for one in profiles][::11] == ["step 3, rank 0", "step 14, rank 0"]


def test_the_bars_of_a_step_have_the_shares(tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_account(run_dir, "step_3_rank_0")
    figure = build_profile_figure(read_profiles(load_run_record(run_dir))).draw()
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([60, 20, 20])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["60%", "20%", "20%"]
    assert re.match(r"step 3, rank 0, 0\.1 s", figure.axes[0].get_yticklabels()[0].get_text())
