"""Overrides with former keys, and of dictionaries of structured values."""

import pytest

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.data import SourceConfig
from hlat.config.resolve import convert_to_dataclasses

SOURCE = SourceConfig(paths=["x.arrow"], weight=0.3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+data.sources.mine={paths: [x.arrow], weight: 0.3}"],
        ["+data.sources.mine.weight=0.3", "+data.sources.mine.paths=[x.arrow]"],
    ],
)
def test_add_a_source(overrides: list[str]) -> None:
    sources = convert_to_dataclasses(compose_config(overrides)).data.sources
    assert sources["mine"] == SOURCE
    assert len(sources) > 1


@pytest.mark.parametrize(
    "override", ["+data.sources.mine={path: [x.arrow]}", "+data.sources.mine={weight: no}"]
)
def test_reject_a_source_that_does_not_fit_the_schema(override: str) -> None:
    with pytest.raises(ConfigError):
        compose_config([override])


def test_a_renamed_key_works_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose_config(["compiler.inductor=true"]).compiler.torch_compile is True
    assert "hlat: compiler.inductor is now compiler.torch_compile" in capsys.readouterr().err
