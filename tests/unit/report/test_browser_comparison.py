"""Page of a sweep in Chromium: outliers, bands over seeds, axes, tables and downloads."""

import csv
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from omegaconf import DictConfig, OmegaConf

from hlat.report import __main__ as report
from tests.unit.report.test_browser import CHROMIUM, LOSS, Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,  # starts Chromium
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)"),
]
SEEDS, STEPS, PEAK_STEP = 4, 60, 30


def _write_run(folder: Path, config: DictConfig, scale: float) -> None:
    folder.mkdir()
    tokens = config.batch.global_batch_size * config.batch.sequence_length
    rows = [
        {
            "step": step,
            "tokens": step * tokens,
            "loss": scale * (2 + 1 / step),
            "grad_norm": 44.0 if step == PEAK_STEP else 1 + step % 3 / 10,
            "attempt": 1,
            "time": 1e9 + 60 * step,
        }
        for step in range(1, STEPS + 1)
    ]
    end = {"event": "finish", "step": STEPS, "attempt": 1, "time": 1e9 + 60 * STEPS}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text(json.dumps(end) + "\n")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, compose: Callable[..., DictConfig]) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for lr, scale in (("1e-3", 1.0), ("3e-3", 0.9)):
        for seed in range(1, SEEDS + 1):
            name = f"{lr}-{seed}"
            config = compose(f"run.name={name}", f"optimizer.lr={lr}", f"run.seed={seed}")
            _write_run(root / name, config, scale * (1 + seed / 100))
    assert report.main([str(root)]) == 0
    return root / "comparison.html"


@pytest.fixture
def tab(browser: Tab, page: Path) -> Tab:
    browser.open(page)
    browser.evaluate("sessionStorage.clear()")
    browser.open(page)
    return browser


def _count(tab: Tab, selector: str) -> int:
    return int(tab.evaluate(f"document.querySelectorAll('{selector}').length"))


def _click(tab: Tab, selector: str) -> None:
    tab.evaluate(f"document.querySelector('{selector}').click()")


def _download(tab: Tab, selector: str, folder: Path, name: str) -> str:
    tab("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    _click(tab, selector)
    ends = time.monotonic() + 60
    while not (folder / name).exists() or not (folder / name).stat().st_size:
        assert time.monotonic() < ends, [*folder.iterdir()]
        time.sleep(0.05)
    return (folder / name).read_text()


def test_outliers_are_marked_and_do_not_determine_the_axis(tab: Tab) -> None:
    figure = "figure[data-plot=grad_norm]"
    assert "40" not in tab.ticks(figure)
    assert _count(tab, f"{figure} path.outlier") > 0
    assert "outside of the axis" in tab.evaluate(
        f"document.querySelector('{figure} path.outlier title').textContent"
    )
    tab.mouse("mouseMoved", (PEAK_STEP - 1) / (STEPS - 1), on=figure)
    assert "44" in tab.read(figure), "the value can be read"
    _click(tab, f"{figure} .everything")
    assert "40" in tab.ticks(figure)
    assert _count(tab, f"{figure} path.outlier") == 0


def test_seeds_are_bands_or_single_curves(tab: Tab) -> None:
    assert (_count(tab, f"{LOSS} path.band"), _count(tab, f"{LOSS} path.curve")) == (2, 2)
    tab.mouse("mouseMoved", 1.0)
    first, *values = tab.read().split("\n")
    assert first.startswith(f"step {STEPS},")
    assert [value.split(":")[0] for value in values] == ["lr=0.001 (4 seeds)", "lr=0.003 (4 seeds)"]
    assert re.search(r"2\.06708 \(2\.037 to 2\.097\)", values[0])
    _click(tab, "input[value=runs]")
    assert (_count(tab, f"{LOSS} path.band"), _count(tab, f"{LOSS} path.curve")) == (0, 8)
    tab.mouse("mouseMoved", 1.0)
    assert len(tab.read().split("\n")) == 9, "all runs at once"


def test_axes_of_flops_and_logarithms(tab: Tab) -> None:
    _click(tab, "input[value=flops]")
    assert "FLOPs of training" in tab.ticks()
    tab.mouse("mouseMoved", 1.0)
    assert "FLOPs" in tab.read().split("\n")[0]
    _click(tab, "input[value=steps]")
    _click(tab, "#log-x")
    assert {"1", "10", "50"} <= {*tab.ticks()}
    tab.mouse("mouseMoved", 0.5)
    assert tab.read().startswith("step 8,"), "the middle of 1 to 60 in logarithms"
    tab.drag(0.5, 1.0)
    tab.mouse("mouseMoved", 0.0)
    assert tab.read().startswith("step 8,"), "zoom follows the logarithmic axis"


def test_rows_can_be_sorted_and_filtered(tab: Tab) -> None:
    runs = "[...document.querySelectorAll('table.data')].find((t) => t.caption.textContent.startsWith('Runs'))"
    rows = f"[...{runs}.tBodies[0].rows].filter((r) => !r.hidden).map((r) => r.cells[0].innerText)"
    heads = tab.evaluate(f"[...{runs}.tHead.rows[0].cells].map((c) => c.innerText.trim())")
    column = [head.startswith("Final loss") for head in heads].index(True)
    initial = tab.evaluate(rows)
    head = f"{runs}.tHead.rows[0].cells[{column}]"
    tab.evaluate(f"{head}.querySelector('button').click()")
    assert tab.evaluate(f"{head}.ariaSort") == "ascending"
    assert (tab.evaluate(rows)[0], tab.evaluate(rows)[-1]) == ("3e-3-1", "1e-3-4")
    tab.evaluate(f"{head}.querySelector('button').click()")
    assert (tab.evaluate(rows)[0], tab.evaluate(rows)[-1]) == ("1e-3-4", "3e-3-1")
    tab.evaluate(f"{head}.querySelector('button').click()")
    assert tab.evaluate(rows) == initial
    field = f"{runs}.closest('.wide').previousElementSibling.querySelector('input')"
    tab.evaluate(f"{field}.value = 'finish 3e-3-2'; {field}.dispatchEvent(new Event('input'))")
    assert tab.evaluate(rows) == ["3e-3-2"]


def test_figures_and_tables_can_be_saved(tab: Tab, tmp_path: Path) -> None:
    tools = f"{LOSS} .tools button"
    drawing = _download(tab, f"{tools}:nth-of-type(3)", tmp_path, "loss.svg")
    root = ElementTree.fromstring(drawing)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    labels = {
        "".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"Training loss", "lr=0.001 (4 seeds)", "tokens"} <= labels
    table = _download(tab, f"{tools}:nth-of-type(4)", tmp_path, "loss.csv")
    rows: list[dict[str, Any]] = [*csv.DictReader(table.splitlines())]
    assert len(rows) == 2 * STEPS
    assert rows[0]["curve"] == "lr=0.001 (4 seeds)"
    assert float(rows[0]["nats per token"]) == pytest.approx(3 * 1.025)
    assert float(rows[0]["highest seed"]) == pytest.approx(3 * 1.04)
    points = _download(tab, ".table-tools button", tmp_path, "points.csv")
    assert len(points.splitlines()) == 3


def test_page_starts_with_verdict_and_effects(tab: Tab) -> None:
    assert tab.evaluate("document.querySelector('main h2').innerText") == "Verdict"
    verdict = tab.evaluate("document.querySelector('.verdict').innerText")
    assert "optimizer.lr=0.003 and optimizer.lr=0.001" in verdict
    figure = "document.querySelector('main figure svg')"
    assert tab.evaluate(f"{figure}.getAttribute('aria-label')").startswith(
        "Difference to the baseline"
    )
    top = tab.evaluate(f"{figure}.getBoundingClientRect().top")
    assert 0 < top < 900, "on the first screen"
