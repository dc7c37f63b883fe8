"""YAML parser in C, which takes a tenth of the time of the one in Python."""

import functools
from typing import Any

import yaml
from omegaconf import _utils as omegaconf_utils
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loader of plain YAML."""
_get_python_loader = omegaconf_utils.get_yaml_loader


def install_c_parser() -> None:
    """Parse the files of OmegaConf in C in this process; OmegaConf has no hook for it."""
    if yaml.__with_libyaml__:
        vars(omegaconf_utils)["get_yaml_loader"] = _get_c_loader


@functools.cache
def _get_c_loader() -> type:
    """Return OmegaConf's loader with the parser in C."""

    class CLoader(yaml.cyaml.CParser, _get_python_loader()):  # type: ignore[misc]
        """Loader with the initialization of yaml.CSafeLoader."""

        def __init__(self, stream: Any) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    return CLoader
