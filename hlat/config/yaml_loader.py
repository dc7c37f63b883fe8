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
    """Return OmegaConf's loader with the parser in C.

    The errors are those of the parser in Python, which name the line where a construct begins.
    """
    python_loader = _get_python_loader()

    class CLoader(yaml.cyaml.CParser, python_loader):  # type: ignore[misc, valid-type]
        """Loader with the initialization of yaml.CSafeLoader."""

        def __init__(self, stream: Any) -> None:
            self._file = getattr(stream, "name", None)
            self._text = stream.read() if hasattr(stream, "read") else stream
            yaml.cyaml.CParser.__init__(self, self._text)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

        def get_single_data(self) -> Any:
            """Return the content of the document."""
            try:
                return super().get_single_data()
            except yaml.YAMLError:
                loader = python_loader(self._text)
                loader.name = self._file or loader.name
                return loader.get_single_data()

    return CLoader
