import pytest

from hlat.report.figures import ReportFigure


@pytest.fixture(autouse=True)
def without_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave PNG files empty: rasterizing takes longer than all else."""
    monkeypatch.setattr(ReportFigure, "render_png", lambda _: b"")
