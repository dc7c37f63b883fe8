"""A torch of another release than the Neuron packages is rejected before its import."""

import importlib.util
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.resolve import resolve_config
from hlat.engine.engine_factory import create_engine
from hlat.engine.neuron import neuron_packages


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Add empty packages with a name and a version before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(**versions: str) -> None:
        for name, version in versions.items():
            directory = tmp_path / f"{name}-{version}.dist-info"
            directory.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            (directory / "METADATA").write_text(text)

    return add


@pytest.mark.parametrize(
    ("torch", "torch_neuronx"), [("2.9.0", "2.9.0.2.12.22436+abc"), ("2.13.0+cpu", "2.13.3.0.7")]
)
def test_equal_releases_are_accepted(install, torch: str, torch_neuronx: str) -> None:
    install(torch=torch, torch_neuronx=torch_neuronx)
    neuron_packages.validate_torch_release()


def test_without_neuron_any_torch_is_accepted(install) -> None:
    install(torch="2.15.0")
    neuron_packages.validate_torch_release()


def test_another_release_is_rejected_with_both_versions(install) -> None:
    install(torch="2.15.0", torch_neuronx="2.8.0.2.12.22436", torch_xla="2.8.1")
    with pytest.raises(ConfigError) as error:
        neuron_packages.validate_torch_release()
    first, second = error.value.problems
    assert first.startswith(
        "torch 2.15.0 is installed, but torch-neuronx 2.8.0.2.12.22436 is built for torch 2.8; "
    )
    assert "torch-xla 2.8.1" in second
    assert "docs/neuron.md#installation" in first


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"torch_xla", "boto3"}, "needs torch_xla, which .* install the Neuron SDK's PyTorch"),
        ({"boto3", "transformers"}, r"needs boto3 and transformers, .* install 'hlat\[nxd\]'"),
    ],
)
def test_modules_that_nxd_imports_are_required(
    compose, monkeypatch: pytest.MonkeyPatch, missing: set[str], message: str
) -> None:
    config = resolve_config(compose())
    config.engine.name = EngineBackend.nxd
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ConfigError, match=message):
        create_engine(config)
