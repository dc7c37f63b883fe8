"""The pages as Chromium shows them: in light and dark, and no wider than a phone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from hlat import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt install chromium)"),
]
WIDTH = 500
"""The narrowest window that headless Chromium opens."""


def _chromium(folder: Path, *words: str) -> str:
    """A user of its own, and a proxy that nobody answers behind: pages need no network."""
    isolated = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--proxy-server=127.0.0.1:9",
    ]
    command = [str(CHROMIUM), *isolated, f"--user-data-dir={folder / 'user'}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    for name in ("a-run-with-a-rather-long-name-as-sweeps-give-them", "b"):
        folder = root / name
        folder.mkdir()
        rows = [
            {"step": step, "tokens": 512 * step, "loss": 5 / step, "grad_norm": 1.0, "attempt": 1, "time": 1e9 + step}
            for step in range(1, 50)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(
            f"optimizer: {{lr: {len(name)}}}\nphase: {{name: {'x' * 300}}}\n"
        )
        spikes = [{"event": "spike", "step": step, "attempt": 1, "time": 1e9} for step in (3, 4, 9)]
        (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spikes))
        assert report.main([str(folder)]) == 0
    assert report.main([str(root)]) == 0
    return {"report": root / "b/report.html", "comparison": root / "comparison.html"}


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_light_and_dark_are_both_drawn(name: str, pages: dict[str, Path], tmp_path: Path) -> None:
    brightness = {}
    for mode, words in (("light", []), ("dark", ["--force-dark-mode"])):
        file = tmp_path / f"{mode}.png"
        size = f"--window-size={WIDTH},1200"
        _chromium(tmp_path, *words, size, f"--screenshot={file}", pages[name].as_uri())
        pixels = image.imread(file)[..., :3]
        brightness[mode] = float(np.median(pixels))
        # Curves and text are there: a twentieth of the colours is neither paper nor near it
        assert (
            float(np.abs(pixels - np.median(pixels, axis=(0, 1))).max(-1).__gt__(0.2).mean()) > 0.01
        )
    assert brightness["light"] > 0.95
    assert brightness["dark"] < 0.2


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_a_phone_need_not_scroll_sideways(
    name: str, pages: dict[str, Path], tmp_path: Path
) -> None:
    probe = "<script>document.title = document.documentElement.scrollWidth</script></body>"
    copy = tmp_path / "page.html"
    copy.write_text(pages[name].read_text().replace("</body>", probe))
    shown = _chromium(tmp_path, f"--window-size={WIDTH},900", "--dump-dom", copy.as_uri())
    (width,) = re.findall(r"<title>(\d+)</title>", shown)
    assert int(width) <= WIDTH
