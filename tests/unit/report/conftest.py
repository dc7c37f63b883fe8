from collections.abc import Iterator

import pytest

from hlat.figures.report_figure import ReportFigure
from tests.unit.report.test_browser import Tab


@pytest.fixture(autouse=True)
def without_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty PNG files, because rasterization is slow."""
    monkeypatch.setattr(ReportFigure, "render_png", lambda _: b"")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Open one tab of Chromium per module."""
    tab = Tab(tmp_path_factory.mktemp("user"))
    yield tab
    tab.close()
