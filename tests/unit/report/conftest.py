from collections.abc import Iterator

import pytest

from hlat.report.figures import ReportFigure
from tests.unit.report.test_browser import Tab


@pytest.fixture(autouse=True)
def without_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave PNG files empty: rasterizing takes longer than all else."""
    monkeypatch.setattr(ReportFigure, "render_png", lambda _: b"")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Return a tab of Chromium, which the tests of a module share."""
    tab = Tab(tmp_path_factory.mktemp("user"))
    yield tab
    tab.close()
