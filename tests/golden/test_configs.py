"""Fully resolved configurations of every model, experiment and sweep, compared with the record."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from hlat.config.package_dirs import find_package_dir

GOLDEN = Path(__file__).parent / "configs"
CHOICES = [
    *(f"model={file.stem}" for file in sorted((find_package_dir("conf") / "model").glob("*.yaml"))),
    *(
        f"experiment={file.stem}"
        for file in sorted((find_package_dir("conf") / "experiment").glob("*.yaml"))
    ),
    *(f"+sweep={file.stem}" for file in sorted(find_package_dir("sweeps").glob("*.yaml"))),
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.slow_after(12)
def test_configuration_is_as_recorded(
    choice: str, compose: Callable[..., DictConfig], pytestconfig: pytest.Config
) -> None:
    config = compose(choice)
    OmegaConf.resolve(config)
    now = OmegaConf.to_yaml(config)
    file = GOLDEN / f"{choice.lstrip('+').replace('=', '_')}.yaml"
    if pytestconfig.getoption("--update"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(now)
    assert now == file.read_text(), (
        f"{choice} changed; if that is meant: pytest tests/golden --update"
    )


def test_every_record_belongs_to_a_choice() -> None:
    recorded = {file.stem for file in GOLDEN.glob("*.yaml")}
    assert recorded == {choice.lstrip("+").replace("=", "_") for choice in CHOICES}
