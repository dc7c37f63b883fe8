from collections.abc import Iterator

import pytest

from tests.unit.report.test_browser import Tab


@pytest.fixture(autouse=True)
def _use_without_png(without_png: None) -> None:
    """Write no PNG files in the tests of this directory."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Open one tab of Chromium per module."""
    tab = Tab(tmp_path_factory.mktemp("user"))
    yield tab
    tab.close()
