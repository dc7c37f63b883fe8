"""Report of a run directory."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.figures.report_figure import build_panel_figure, build_run_panels
from hlat.report import __main__ as report
from hlat.report.report_writer import write_report
from hlat.study.run_record import load_run_record

FIGURES = [
    "data_wait",
    "grad_norm",
    "heldout",
    "learning_rate",
    "loss",
    "param_norm",
    "throughput",
    "time",
]

START = 1_763_654_400.0
TOKENS_PER_STEP = 4096


def metrics_row(step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "tokens": step * TOKENS_PER_STEP,
        "loss": 10 / math.sqrt(step),
        "grad_norm": 1.5,
        "param_norm": 60 + step / 100,
        "learning_rate": 3e-4,
        "tokens_per_second": 8192.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.005,
        "mfu": None,
        "phase": "main",
        "attempt": 1,
        "time": START + step / 2,
    }
    return row | changes


def event_row(event: str, step: int, **details: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "attempt": 1, "time": START + step / 2, **details}


def evaluation(step: int, bits: float) -> dict[str, Any]:
    return event_row(
        "evaluate",
        step,
        loss={"code": 2 * bits, "docs": 2 * bits + 1},
        bits_per_byte={"code": bits, "docs": bits + 0.5, "mean": bits + 0.25},
    )


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, steps: int = 50) -> Path:
    folder.mkdir(parents=True)
    rows = [metrics_row(step, attempt=1 + (step > steps // 2)) for step in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", rows)
    events = [
        event_row("start", 0),
        evaluation(0, 3.9),
        event_row("resume", steps // 2, attempt=2, refused=["checkpoint step_00000030 is refused"]),
        event_row("phase", steps // 2, attempt=2, name="upsample"),
        evaluation(steps, 2.125) | {"attempt": 2},
        event_row("finish", steps, attempt=2),
    ]
    write_lines(folder / "events.jsonl", events)
    (folder / "config.yaml").write_text("model:\n  name: tiny\n")
    provenance = {"git_revision": "292ee1e", "git_diff": "+a\n-b", "packages": {"torch": "2.13.0"}}
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a finished run of 50 steps."""
    return make_run(tmp_path / "tiny-7f3a")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a finished run and its report, which tests only read."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "tiny-7f3a")
    write_report(folder)
    return folder


class Page(HTMLParser):
    """Parsed page: tags with attributes, text, and tags that are not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text_parts = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text_parts += f" {data}"

    @property
    def text(self) -> str:
        return " ".join(self.text_parts.split())

    def attributes(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def read_page(run: Path) -> Page:
    write_report(run)
    return parse_page(run)


def parse_page(run: Path) -> Page:
    page = Page((run / "report.html").read_text())
    assert page.open == []
    return page


def test_page_contains_the_values_of_the_run(finished: Path) -> None:
    text = parse_page(finished).text
    for expected in (
        "Run report tiny-7f3a",
        "Steps 50",
        "Tokens 204,800 (204.8k)",
        "Started (UTC) 2025-11-20 16:00:00",
        "Wall time, first to last row 25 s",
        "Tokens per second, median 8,192",
        "Model FLOP utilisation, median n/a",
        "Step time waiting for data 1 %",
        "Final training loss (nats per token) 1.414",
        "Attempts 2",
        "Uptime 100 %",
        "Ended finish ",
        "code 7.800 4.250 3.900 2.125",
        "docs 8.800 5.250 4.400 2.625",
        "mean n/a n/a 4.150 2.375",
        "resume refused: checkpoint step_00000030 is refused",
        "Git revision 292ee1e",
        "model: name: tiny",
        "Packages torch 2.13.0",
        "Git diff +a -b",
        "Dashed vertical lines: the run was resumed. Dotted vertical lines: the next phase began.",
    ):
        assert expected in text


def test_every_figure_is_on_the_page_with_its_description(finished: Path) -> None:
    page = parse_page(finished)
    described = [attributes["aria-label"] or "" for attributes in page.attributes("svg")]
    assert len(described) == len(FIGURES)
    assert described[0].startswith(
        "Training loss (nats per token) over 204.8k tokens; from 10 to 1.414"
    )
    assert all(attributes["role"] == "img" for attributes in page.attributes("svg"))
    assert page.text.count("tokens") >= len(FIGURES)


def test_every_figure_is_a_separate_file(finished: Path) -> None:
    for ending in ("svg", "png"):
        assert sorted(path.stem for path in (finished / "figures").glob(f"*.{ending}")) == FIGURES
    for path in (finished / "figures").glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in path.read_text()


def test_colors_are_variables_of_the_page(finished: Path) -> None:
    html = (finished / "report.html").read_text()
    svg = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r'(href="|url\()#\w+', "", svg))
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", html))
    light, dark = html.split("@media (prefers-color-scheme: dark)", 1)
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark


def test_page_is_self_contained(finished: Path) -> None:
    html = (finished / "report.html").read_text()
    assert not re.search(r"https?:", html)
    page = Page(html)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href"):
                assert (value or "")[:1] == "#"
                assert (value or "")[1:] in ids


def test_only_the_script_with_the_digest_is_allowed(finished: Path) -> None:
    html = (finished / "report.html").read_text()
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    (policy,) = [
        attributes["content"] or ""
        for attributes in Page(html).attributes("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}' ")


def test_a_figure_is_drawn_once_per_file(finished: Path, monkeypatch) -> None:
    record, draws = load_run_record(finished), []
    figure = build_panel_figure(build_run_panels(record)[0], record)
    draw = Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda *words: draws.append(draw(*words)))
    assert figure.render_svg() == figure.render_svg()
    assert len(draws) == 2


def test_png_files_have_a_white_background(finished: Path) -> None:
    for path in (finished / "figures").glob("*.png"):
        pixels = image.imread(path)
        assert pixels.shape[1] >= 900
        assert (pixels[0, 0] == 1).all()
    loss = image.imread(finished / "figures" / "loss.png")[..., :3]
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert (np.abs(loss - blue).max(-1) < 0.01).sum() > 500, "the curve has its colour"


def test_data_of_the_page_equal_logged_values(finished: Path) -> None:
    html = (finished / "report.html").read_text()
    data = {
        lines["name"]: lines
        for text in re.findall(r'<script type="application/json">(.*?)</script>', html)
        for lines in [json.loads(text)]
    }
    assert [*data] == [
        *("loss", "grad_norm", "param_norm", "learning_rate", "heldout", "throughput", "data_wait")
    ]
    (loss,) = data["loss"]["series"]
    assert loss["steps"] == [*range(1, 51)]
    assert loss["tokens"][-1] == 204_800
    assert loss["hours"][-1] == pytest.approx(25 / 3600, rel=1e-6)
    assert loss["values"][3] == 5
    assert loss["colour"] == "--series-1"
    assert data["loss"]["resumed"]["steps"] != []
    assert [one["label"] for one in data["heldout"]["series"]] == ["code", "docs", "mean"]


@pytest.mark.slow
def test_a_long_run_is_thinned_and_its_loss_smoothed_from_all_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6001)
    text = read_page(run).text
    expected = "6,001 rows, drawn as the smallest and largest value of each of 3,000 windows."
    assert text.count(expected) == len(FIGURES) - 2
    html = (run / "report.html").read_text()
    lines = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', html)[0])
    (loss,) = lines["series"]
    assert len(loss["values"]) <= 6000
    assert loss["means"]["values"][0] == pytest.approx(
        sum(10 / math.sqrt(step) for step in (1, 2, 3)) / 3, rel=1e-6
    )
    assert loss["means"]["steps"][0] == 2


@pytest.mark.slow
def test_scores_of_checkpoints_are_over_tokens_with_errors(run: Path) -> None:
    scored = [
        event_row("score", 20, tokens=81_920, scores={"arc": 0.25, "mmlu": 0.3}, stderr={"arc": 0.02}),
        event_row("score", 40, tokens=163_840, scores={"arc": 0.5}, stderr={"arc": 0.01}),
        event_row("score", 40, tokens=163_840, scores={"mmlu": 0.4}, stderr={}),
        event_row("score", 50, tokens=204_800, scores="broken"),
    ]  # fmt: skip
    scored[1] |= {"limit": 20, "time": START + 1e6}
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in scored))
    page = read_page(run)
    label = next(
        attributes["aria-label"] or ""
        for attributes in page.attributes("svg")
        if (attributes["aria-label"] or "").startswith("Evaluation")
    )
    assert label == (
        "Evaluation (score) over 163.8k tokens; arc: from 0.25 to 0.5, lowest 0.25, highest 0.5; "
        "mmlu: from 0.3 to 0.4, lowest 0.3, highest 0.4."
    )
    assert "arc 81,920 20 0.002778 0.25 ± 0.02 arc 163,840 40 0.005556 0.5 ± 0.01" in page.text
    assert "one standard error in each direction" in page.text
    assert "Some scores are of the first 20 examples of a task." in page.text
    assert "Wall time, first to last row 25 s" in page.text, "a score is no sign of life"
    assert (run / "figures" / "scores.png").exists()


def test_tables_are_accessible(finished: Path) -> None:
    page = parse_page(finished)
    curves = len(FIGURES) - 1  # the time figure has a separate table
    assert len(page.attributes("caption")) == len(page.attributes("table")) == 5 + curves
    assert all("scope" in attributes for attributes in page.attributes("th"))


@pytest.mark.slow
def test_output_is_deterministic(run: Path) -> None:
    first = write_report(run).read_bytes()
    figure = (run / "figures" / "loss.svg").read_bytes()
    assert write_report(run).read_bytes() == first
    assert (run / "figures" / "loss.svg").read_bytes() == figure
    assert not list(run.rglob("*.tmp"))


@pytest.mark.slow
def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    attack = "\"'><script>alert(1)<script>&amp;"
    run = make_run(tmp_path / attack)
    (run / "config.yaml").write_text(f"name: {attack}\n")
    (run / "provenance.json").write_text(json.dumps({attack: attack, "git_diff": f"{attack}\n"}))
    hostile = event_row(attack, 50, **{attack: attack, "reason": attack})
    bits = evaluation(50, 2.0)
    bits["bits_per_byte"][attack] = 2.0
    write_lines(run / "events.jsonl", [event_row("start", 0), bits, hostile])
    page = read_page(run)
    types = [attributes.get("type") for attributes in page.attributes("script")]
    assert types == ["application/json"] * (len(types) - 1) + [None]
    assert page.text.count(attack) >= 8
    assert any(attack in (attributes["aria-label"] or "") for attributes in page.attributes("svg"))
    for path in (run / "figures").glob("*.svg"):
        ElementTree.parse(path)


@pytest.mark.slow
def test_mathtext_in_a_source_name_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    bits = evaluation(50, 2.0)
    bits["bits_per_byte"] = {"$\\frac{$": 2.0, "_hidden": 1.0}
    write_lines(run / "events.jsonl", [bits])
    write_report(run)
    svg = (run / "figures" / "heldout.svg").read_text()
    assert ">$\\frac{$<" in svg
    assert ">_hidden<" in svg


@pytest.mark.slow
def test_partial_lines_are_counted_and_others_are_read(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 51, "tok\xff')
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"[1]\n\n")
    text = read_page(run).text
    assert "Steps 50" in text
    assert "Unreadable lines 2" in text


@pytest.mark.parametrize(
    "name", ["config.yaml", "provenance.json", "metrics.jsonl", "events.jsonl"]
)
@pytest.mark.slow_after(1)
def test_any_file_may_be_empty_or_missing(run: Path, name: str) -> None:
    (run / name).write_text("")
    read_page(run)
    (run / name).unlink()
    read_page(run)


def test_page_of_a_run_without_steps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    text = read_page(tmp_path).text
    assert "No step was logged" in text
    assert "No event is recorded" in text
    assert "No evaluation on held-out text is recorded" in text
    assert "no end is recorded: running or killed" in text
    assert list((tmp_path / "figures").iterdir()) == []


def test_a_single_evaluation_before_the_first_step_is_shown(tmp_path: Path) -> None:
    write_lines(tmp_path / "events.jsonl", [event_row("start", 0), evaluation(0, 3.9)])
    assert "code 7.800 7.800 3.900 3.900" in read_page(tmp_path).text


@pytest.mark.slow
def test_frequent_events_are_grouped_and_rare_ones_are_in_order(run: Path) -> None:
    spikes = [event_row("spike", step, grad_norm=9.0) for step in range(10, 50, 10)]
    write_lines(run / "events.jsonl", [event_row("start", 0), *spikes, event_row("finish", 50)])
    page = read_page(run)
    assert "spike: 4, steps 10 to 40 Events of the kind spike" in page.text
    in_order = page.text.split("Events in order")[1].split("Events of the kind")[0]
    assert in_order.index(" start ") < in_order.index(" finish ")
    assert " spike " not in in_order


@pytest.mark.slow
def test_header_contains_size_learning_rate_and_batch(
    run: Path, compose: Callable[..., DictConfig]
) -> None:
    config = OmegaConf.to_yaml(compose("optimizer.lr=2e-3", "batch.global_batch_size=4"))
    (run / "config.yaml").write_text(config)
    text = read_page(run).text
    assert re.search(r"Model tiny Parameters [\d.]+[kM] Learning rate 0.002 Schedule cosine", text)
    assert "Batch 4 x 256 = 1,024 tokens" in text


@pytest.mark.slow
def test_killed_run_is_not_finished(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event_row("resume", 50, attempt=3)) + "\n")
    assert "Ended no end is recorded" in read_page(run).text


@pytest.mark.slow
def test_reason_of_the_end_is_displayed(run: Path) -> None:
    rows = [event_row("interrupt", 30, signal="SIGTERM"), event_row("resume", 30)]
    write_lines(run / "events.jsonl", [*rows, event_row("diverge", 31, loss="nan")])
    assert "Ended diverge; loss: nan" in read_page(run).text


@pytest.mark.slow
def test_non_finite_values_are_excluded_and_counted(tmp_path: Path) -> None:
    rows = [metrics_row(step, loss=math.nan if step % 10 == 0 else 2.0) for step in range(1, 51)]
    rows[3]["loss"] = math.inf
    rows[4]["loss"] = "broken"
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert "Not drawn, as missing or not finite: 7." in read_page(tmp_path).text


@pytest.mark.slow
def test_time_is_listed_by_category_and_attempt(run: Path) -> None:
    events = [
        event_row("start", 0, began=START - 10),
        event_row("resume", 20, attempt=2, time=START + 45, began=START + 40),
    ]
    write_lines(run / "events.jsonl", events)
    rows = [metrics_row(step) for step in range(1, 21)]
    write_lines(run / "metrics.jsonl", rows)
    text = read_page(run).text
    assert "Start-up 15 s 27.273 % process start to the first step" in text
    assert "Steps that survived 9.9 s 18.000 % steps whose" in text
    assert "Data wait 0.1 s 0.182 % steps waiting" in text
    assert "Down 30 s 54.545 % no attempt was running" in text
    assert "Unaccounted 0 s 0.000 % time that was not measured Wall time 55 s 100.000 %" in text
    assert "1 2025-11-20 15:59:50 50 s 10 s 0 s 0 s 9.9 s 0.1 s 0 s 0 s 0 s 30 s 0 s" in text
    assert "2 2025-11-20 16:00:40 5 s 5 s 0 s" in text
    assert "add up to the wall time within 0.5%" in text
    assert "Uptime 45.5 %" in text
    assert "Goodput 18 %" in text
    svg = (run / "figures" / "time.svg").read_text()
    assert "Wall time of 55 s by category: down 54.5 %, start-up 27.3 %, steps" in svg
    assert "attempt 2, 5 s" in svg


@pytest.mark.slow
def test_inconsistent_time_breakdown_is_reported(run: Path) -> None:
    write_lines(run / "events.jsonl", [event_row("start", 0, began=START - 10, time=START - 1)])
    write_lines(run / "metrics.jsonl", [metrics_row(step) for step in range(1, 51)])
    text = read_page(run).text
    assert "Unaccounted 1 s" in text
    assert "do not add up to the wall time" in text


@pytest.mark.slow
def test_figure_contains_the_last_of_many_attempts(run: Path) -> None:
    events = [
        event_row("start", 0, attempt=number, time=START + 60 * number, began=START + 60 * number)
        for number in range(1, 31)
    ]
    write_lines(run / "events.jsonl", events)
    text = read_page(run).text
    assert "The last 12 of 30 attempts." in text
    svg = (run / "figures" / "time.svg").read_text()
    assert ("attempt 18," in svg, "attempt 19," in svg) == (False, True)


def test_other_directories_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_command_prints_the_path(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(run)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == ["uptime 100 %, goodput 99 % over 2 attempts; 0 s lost, 0 s down"]
    assert last == str(run / "report.html")


def test_command_rejects_missing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path / "missing")]) == 2
    assert "missing is not a run directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        report.main([])
    assert exit_.value.code == 2
