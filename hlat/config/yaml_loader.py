"""YAML parser and emitter in C, which take a tenth and a quarter of the time of those in Python."""

import functools
from typing import Any

import yaml
from omegaconf import _utils as omegaconf_utils
from omegaconf import omegaconf as omegaconf_api
from yaml.constructor import SafeConstructor
from yaml.representer import SafeRepresenter
from yaml.resolver import Resolver

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loader of plain YAML."""
_get_python_loader = omegaconf_utils.get_yaml_loader
_get_python_dumper = omegaconf_utils.get_omega_conf_dumper


def install_c_yaml() -> None:
    """Parse and write the files of OmegaConf in C in this process; OmegaConf has no hook for it."""
    if yaml.__with_libyaml__:
        vars(omegaconf_utils)["get_yaml_loader"] = _get_c_loader
        vars(omegaconf_api)["get_omega_conf_dumper"] = _get_c_dumper


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


@functools.cache
def _get_c_dumper() -> type:
    """Return OmegaConf's dumper with the emitter in C, for the arguments of `OmegaConf.to_yaml`."""

    class CDumper(yaml.cyaml.CEmitter, _get_python_dumper()):  # type: ignore[misc]
        """Dumper with the initialization of yaml.CSafeDumper."""

        def __init__(
            self,
            stream: Any,
            default_flow_style: bool,
            allow_unicode: bool,
            sort_keys: bool,
            **options: Any,
        ) -> None:
            options = {key: value for key, value in options.items() if value is not None}
            style = options.pop("default_style", None)
            yaml.cyaml.CEmitter.__init__(self, stream, allow_unicode=allow_unicode, **options)
            SafeRepresenter.__init__(self, style, default_flow_style, sort_keys)
            Resolver.__init__(self)

    return CDumper
