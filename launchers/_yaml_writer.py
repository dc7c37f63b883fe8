"""YAML output for other programs."""

from typing import Any

import yaml


def format_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as one YAML file with keys in order and without aliases."""
    text = yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=120)
    assert isinstance(text, str)
    return text


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_PlainDumper.add_representer(str, _PlainDumper.represent_str)
