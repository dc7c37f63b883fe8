"""Pages in Chromium: mouse, keyboard and no scripts; light, dark, phone and print."""

import base64
import io
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from hlat.report import __main__ as report
from hlat.report.report_server import build_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)"),
]
ATTACK = "\"'><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
STEPS = 60
LOSS = "figure[data-plot=loss]"


class Tab:
    """Page of Chromium, controlled through a pipe with the DevTools protocol."""

    def __init__(self, folder: Path) -> None:
        output_reader, browser_output = os.pipe()
        browser_input, self._requests = os.pipe()
        isolated = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--proxy-server=127.0.0.1:9",  # no proxy listens there: pages use no network
            "--proxy-bypass-list=127.0.0.1",
            "--remote-debugging-pipe",
        ]
        shell = 'exec "$@" 3<&"$IN" 4>&"$OUT"'  # Chromium uses the file descriptors 3 and 4
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "-", str(CHROMIUM), *isolated, f"--user-data-dir={folder}"],
            pass_fds=(browser_input, browser_output),
            env=os.environ | {"IN": str(browser_input), "OUT": str(browser_output)},
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_input)
        os.close(browser_output)
        self._answers = os.fdopen(output_reader, "rb")
        self._count, self._session = 0, ""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self("Page.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._count += 1
        request = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        self._session = ""
        self("Browser.close")
        os.close(self._requests)
        self._answers.close()
        self._process.wait(30)

    def open(self, location: Path | str, width: int = 1000, dark: bool = False, scripts: bool = True, medium: str = "") -> None:  # fmt: skip
        """Navigate to a page and wait until it is complete."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self("Emulation.setEmulatedMedia", media=medium, features=features)
        self("Emulation.setScriptExecutionDisabled", value=not scripts)
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self("Page.navigate", url=location.as_uri() if isinstance(location, Path) else location)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        ends = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < ends, expression
            time.sleep(0.05)

    def mouse(self, event_type: str, fraction: float, pressed: int = 0, modifiers: int = 0, on: str = LOSS) -> None:  # fmt: skip
        """Move or press at a fraction of the width of a figure's axis."""
        where = f"document.querySelector('{on} svg.plot')"
        self.evaluate(f"{where}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.evaluate(
            f"(() => {{ const r = {where}.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] }})()"
        )
        self(
            "Input.dispatchMouseEvent",
            type=event_type,
            x=left + 62 + fraction * (width - 62 - 12),
            y=top + height / 2,
            button="left" if event_type != "mouseMoved" or pressed else "none",
            buttons=pressed,
            clickCount=1,
            modifiers=modifiers,
        )

    def drag(self, start: float, end: float, modifiers: int = 0) -> None:
        self.mouse("mousePressed", start, 1, modifiers)
        self.mouse("mouseMoved", (start + end) / 2, 1, modifiers)
        self.mouse("mouseMoved", end, 1, modifiers)
        self.mouse("mouseReleased", end, 0, modifiers)

    def key(self, key: str, modifiers: int = 0) -> None:
        for event_type in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=event_type, key=key, modifiers=modifiers)

    def read(self, on: str = LOSS) -> str:
        """Return the displayed values of a figure, or an empty string."""
        return self.evaluate(
            f"(o => o.hidden ? '' : o.innerText)(document.querySelector('{on} output'))"
        )

    def ticks(self, on: str = LOSS) -> list[str]:
        """Return all labels of a figure."""
        return self.evaluate(
            f"[...document.querySelectorAll('{on} svg.plot text')].map(t => t.textContent)"
        )

    def pixels(self) -> np.ndarray:
        shot = self("Page.captureScreenshot", format="png")
        return image.imread(io.BytesIO(base64.b64decode(shot["data"])))[..., :3]

    def _receive(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has gone"
            message += byte
        return json.loads(message)


@pytest.fixture(scope="module")
def tab(browser: Tab) -> Tab:
    return browser


def write_run(folder: Path, steps: int = STEPS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "tokens": 512 * step, "loss": 5 / step, "grad_norm": 1.0, "attempt": 1, "time": 1e9 + 60 * step}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    rows[29]["loss"] = 9.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"optimizer: {{lr: {len(folder.name)}}}\nphase: {{name: {'x' * 300}}}\n"
    )
    events = [{"event": "spike", "step": step} for step in (3, 4, 9)]
    events += [
        {"event": "evaluate", "step": step, "bits_per_byte": {"code": 3 - step / 60, ATTACK: 1 + step / 60, "mean": 2.0}}
        for step in (0, 30, 60)
    ]  # fmt: skip
    stamp = {"attempt": 1, "time": 1e9}
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event | stamp) + "\n" for event in events)
    )
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    for name in ("a-run-with-a-rather-long-name-as-sweeps-give-them", "b"):
        assert report.main([str(write_run(root / name))]) == 0
    assert report.main([str(root)]) == 0
    return {"report": root / "b/report.html", "comparison": root / "comparison.html"}


@pytest.fixture
def open_page(tab: Tab, pages: dict[str, Path]) -> Callable[..., Tab]:
    """Return a function that opens a page without stored selections."""

    def navigate(name: str = "report", **how: Any) -> Tab:
        tab.open(pages[name])
        tab.evaluate("sessionStorage.clear()")
        tab.open(pages[name], **how)
        return tab

    return navigate


@pytest.mark.slow  # starts Chromium
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_light_and_dark_color_schemes(name: str, open_page: Callable[..., Tab]) -> None:
    brightness = {}
    for dark in (False, True):
        tab = open_page(name, dark=dark)
        tab.evaluate(f"document.querySelector('{LOSS}').scrollIntoView()")
        pixels = tab.pixels()
        paper = np.median(pixels, axis=(0, 1))
        brightness[dark] = float(paper.mean())
        assert float((np.abs(pixels - paper).max(-1) > 0.2).mean()) > 0.01, "curves and text"
    assert brightness[False] > 0.95
    assert brightness[True] < 0.2


@pytest.mark.parametrize("width", [pytest.param(320, marks=pytest.mark.slow), 390])
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_page_fits_the_width_of_a_phone(
    name: str, width: int, open_page: Callable[..., Tab]
) -> None:
    tab = open_page(name, width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('figure')].filter(e => e.scrollWidth > e.clientWidth)"
    assert tab.evaluate(f"{cut}.map(e => e.querySelector('figcaption').textContent)") == []
    if name == "report":
        tiles, heldout = "document.querySelector('.tiles')", "document.querySelector('.wide')"
        above = f"{heldout}.getBoundingClientRect().top < {tiles}.getBoundingClientRect().top"
        assert tab.evaluate(above), "results come first"
    assert (
        tab.evaluate(f"getComputedStyle(document.querySelector('{LOSS} svg.plot text')).fontSize")
        == "12px"
    )


@pytest.mark.slow  # starts Chromium
def test_mouse_displays_logged_values(open_page: Callable[..., Tab]) -> None:
    tab = open_page()
    tab.mouse("mouseMoved", 0.5)
    assert tab.read() == "step 30, 15,360 tokens, 0.5000 h\n9 nats per token"
    tab.mouse("mouseMoved", 0.0)
    assert tab.read().startswith("step 1, 512 tokens, 0.01667 h\n5 ")
    tab.mouse("mouseMoved", 0.5, on="figure[data-plot=heldout]")
    assert tab.read() == ""
    read = tab.read("figure[data-plot=heldout]").split("\n")
    assert sorted(read[1:]) == sorted(["code: 2.5", f"{ATTACK}: 1.5", "mean: 2"])


@pytest.mark.slow  # starts Chromium
def test_drag_zooms_all_figures_and_escape_resets_them(open_page: Callable[..., Tab]) -> None:
    tab = open_page()
    tab.evaluate(f"document.querySelector('{LOSS} .everything').click()")
    unzoomed = {name: tab.ticks(f"figure[data-plot={name}]") for name in ("loss", "grad_norm")}
    assert "6" in tab.ticks(), "the peak determines the height"
    tab.drag(0.6, 0.8)
    for name, ticks in unzoomed.items():
        assert tab.ticks(f"figure[data-plot={name}]") != ticks
    assert "20k" in tab.ticks()
    assert "10k" not in tab.ticks()
    assert "6" not in tab.ticks(), "the peak at the middle is not there, so the height follows"
    tab.mouse("mouseMoved", 0.0)
    assert tab.read().startswith("step 37,")
    tab.drag(0.5, 0.75, modifiers=8)
    tab.mouse("mouseMoved", 0.0)
    assert tab.read().startswith("step 34,"), "with Shift the stretch moves"
    tab.key("Escape")
    tab.evaluate("document.querySelector('#controls button').click()")
    assert {name: tab.ticks(f"figure[data-plot={name}]") for name in unzoomed} == unzoomed
    assert tab.evaluate("document.querySelector('#controls button').disabled")


@pytest.mark.slow  # starts Chromium
def test_keyboard_moves_zooms_and_resets(open_page: Callable[..., Tab]) -> None:
    tab = open_page()
    tab.evaluate(f"document.querySelector('{LOSS} svg.plot').focus()")
    tab.key("Home")
    assert tab.read().startswith("step 1,")
    for _ in range(29):
        tab.key("ArrowRight")
    assert tab.read() == "step 30, 15,360 tokens, 0.5000 h\n9 nats per token"
    initial = tab.ticks()
    tab.key("+")
    assert tab.ticks() != initial
    tab.key("Home")
    assert tab.read().startswith("step 16,")
    tab.key("ArrowRight", modifiers=8)
    tab.key("Home")
    assert tab.read().startswith("step 19,")
    tab.key("0")
    assert tab.ticks() == initial
    tab.key("l")
    assert tab.ticks() != initial
    assert tab.evaluate(f"document.querySelector('{LOSS} .scale').ariaPressed") == "true"


@pytest.mark.slow  # starts Chromium
@pytest.mark.parametrize(
    ("axis", "name", "last"), [("steps", "steps", "60"), ("hours", "hours since the run began", "1")]
)  # fmt: skip
def test_axes_of_steps_and_hours(
    axis: str, name: str, last: str, open_page: Callable[..., Tab]
) -> None:
    tab = open_page()
    assert "tokens" in tab.ticks()
    tab.evaluate(f"document.querySelector('input[value={axis}]').click()")
    for figure in (LOSS, "figure[data-plot=heldout]"):
        assert {name, last} <= set(tab.ticks(figure))


@pytest.mark.slow  # starts Chromium
def test_curve_can_be_hidden(open_page: Callable[..., Tab]) -> None:
    tab = open_page()
    figure = "figure[data-plot=heldout]"
    curves = f"document.querySelectorAll('{figure} path.curve').length"
    assert tab.evaluate(curves) == 3
    button = f"document.querySelectorAll('{figure} .choices button')[0]"
    assert tab.evaluate(f"{button}.innerText").strip() == ATTACK
    tab.evaluate(f"{button}.click()")
    assert tab.evaluate(curves) == 2
    assert tab.evaluate(f"{button}.ariaPressed") == "false"
    tab.mouse("mouseMoved", 0.5, on=figure)
    assert ATTACK not in tab.read(figure)
    tab.evaluate(f"{button}.click()")
    assert tab.evaluate(curves) == 3


@pytest.mark.slow  # starts Chromium
def test_smoothed_loss_is_added_to_the_raw_loss(open_page: Callable[..., Tab]) -> None:
    tab = open_page()
    curves = f"[...document.querySelectorAll('{LOSS} path.curve')].map(p => [p.style.opacity, p.getAttribute('d')])"
    ((strength, raw),) = tab.evaluate(curves)
    assert strength == "1"
    tab.evaluate(
        "(s => { s.value = '0.1'; s.dispatchEvent(new Event('change')) })(document.querySelector('select'))"
    )
    (faint, same), (strong, smooth) = tab.evaluate(curves)
    assert (float(faint), same, strong) == (0.3, raw, "1")
    assert smooth != raw
    # The mean is centered: the peak and three rows on each side
    mean = (9 + sum(5 / step for step in (27, 28, 29, 31, 32, 33))) / 7
    heights = [float(point.split()[1]) for point in smooth[1:].split("L")]
    raws = [float(point.split()[1]) for point in raw[1:].split("L")]
    per_unit = (raws[0] - raws[29]) / (9 - 5)
    assert heights[29] == pytest.approx(raws[29] + (9 - mean) * per_unit, abs=0.2)
    tab.mouse("mouseMoved", 0.5)
    assert "\n9 nats" in tab.read(), "what is read is what was logged"


@pytest.mark.slow  # starts Chromium
def test_selections_remain_after_a_reload(
    tab: Tab, tmp_path: Path, open_page: Callable[..., Tab]
) -> None:
    folder = write_run(tmp_path / "live")
    with build_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        tab.open(f"http://127.0.0.1:{server.server_address[1]}/")
        tab.drag(0.25, 0.75)
        tab.evaluate(
            "document.querySelectorAll('figure[data-plot=heldout] .choices button')[0].click()"
        )
        tab.evaluate(f"document.querySelector('{LOSS} .scale').click()")
        before = tab.ticks()
        write_run(folder, STEPS + 20)
        tab("Page.reload")
        tab.wait("document.body?.innerText.includes('Steps\\n80')")
        assert tab.ticks() == before
        assert (
            tab.evaluate("document.querySelectorAll('figure[data-plot=heldout] path.curve').length")
            == 2
        )
        tab.key("Escape")
        tab.evaluate("document.querySelector('#controls button').click()")
        assert "40k" in tab.ticks(), "the new rows are there"
        tab.open("about:blank")
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("how", [{"scripts": False}, {"medium": "print"}])
def test_static_figures_without_scripts_and_in_print(
    how: dict[str, Any], open_page: Callable[..., Tab], tab: Tab
) -> None:
    open_page(**how)
    tab("Emulation.setScriptExecutionDisabled", value=False)  # for the expressions of this test
    shown = "[...document.querySelectorAll('figure > svg')].every(s => s.getBoundingClientRect().height > 100)"
    assert tab.evaluate(shown)
    assert tab.evaluate("document.getElementById('controls').offsetHeight") == 0
    assert tab.evaluate("[...document.querySelectorAll('svg.plot')].every(s => !s.clientHeight)")


def test_markup_in_names_is_escaped(open_page: Callable[..., Tab], tab: Tab) -> None:
    open_page()
    time.sleep(0.2)
    assert tab.evaluate("document.title") == "b - run report"
    assert tab.evaluate("document.querySelectorAll('img, iframe, object, link').length") == 0
    assert tab.evaluate("document.querySelectorAll('script:not([type])').length") == 1


def test_injected_scripts_are_not_executed(
    pages: dict[str, Path], tab: Tab, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    html = pages["report"].read_text()
    probes = (
        "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    )
    page.write_text(html.replace("</h1>", f"</h1>{probes}", 1))
    tab.open(page)
    tab.wait("document.querySelectorAll('figure.live').length > 0")
    time.sleep(0.2)
    assert tab.evaluate("document.title") == "b - run report"


@pytest.mark.slow  # starts Chromium
def test_tables_contain_the_points_of_figures(open_page: Callable[..., Tab], tab: Tab) -> None:
    open_page()
    tab.evaluate(f"document.querySelector('{LOSS} summary').click()")
    rows = tab.evaluate(
        f"[...document.querySelectorAll('{LOSS} tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    assert len(rows) == 12
    assert rows[0] == ["512", "1", "0.01667", "5"]
    assert rows[-1] == ["30,720", "60", "1", "0.0833333"]
