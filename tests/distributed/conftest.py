"""Eight rank processes for the session, started again after an error."""

from collections.abc import Iterator

import pytest

from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from tests.distributed.checks import MODEL, layers
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


@pytest.fixture(scope="session")
def configure(compose):
    """Configure a small model in a layout, such as "tp=2 dp=2 zero=1"."""

    def make(layout: str = "", *overrides: str, accumulation: int = 4) -> Config:
        settings = layout.split()
        dp = next((int(s.removeprefix("dp=")) for s in settings if s.startswith("dp=")), 1)
        micro = f"batch.micro_batch_size={16 // (dp * accumulation)}"
        layout_overrides = (f"parallelism.{setting}" for setting in settings)
        return resolve_config(compose(*MODEL, layers(layout), micro, *layout_overrides, *overrides))

    return make
