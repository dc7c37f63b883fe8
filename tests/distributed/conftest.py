"""Eight processes for the session, started again after a test that broke them."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def _ranks() -> Iterator[list[Ranks]]:
    started = [Ranks(8)]
    yield started
    started[0].close()


@pytest.fixture
def ranks(_ranks: list[Ranks]) -> Ranks:
    if not _ranks[0].alive:
        _ranks[0] = Ranks(8)
    return _ranks[0]
