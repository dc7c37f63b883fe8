"""Consistency of the installed torch with the packages of the Neuron SDK.

The extensions of torch-neuronx and torch-xla are built for one release of torch. With another one,
their import fails, or the device is missing. The versions are read from the metadata of the
packages, since the import of torch may load the extensions.
"""

from importlib import metadata

from hlat.config.config_errors import raise_config_errors

_EXTENSIONS = ("torch-neuronx", "torch-xla")
"""Packages whose version starts with the release of torch for which they are built."""


def validate_torch_release() -> None:
    """Raise ConfigError if torch is not of the release for which an extension is built."""
    torch = _find_version("torch")
    problems = [
        f"torch {torch} is installed, but {name} {version} is built for torch "
        f"{_get_release(version)}; restore the environment of the Neuron SDK, and install hlat "
        "with the constraints of docs/neuron.md#installation, which keep the installed torch"
        for name in _EXTENSIONS
        if (version := _find_version(name)) and _get_release(version) != _get_release(torch or "")
    ]
    raise_config_errors(problems)


def _find_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _get_release(version: str) -> str:
    """Return the major and minor release: 2.9 of 2.9.0.2.12.22436+abc."""
    return ".".join(version.split(".")[:2])
