"""Files for programs that read YAML, written from plain data."""

from typing import Any

import yaml


def as_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as one YAML file, in the order of their keys, each value written out."""
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)
    assert isinstance(text, str)
    return text


class _Plain(yaml.SafeDumper):
    """Repeats a part that occurs twice, as few would read an alias, and keeps lines as lines."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Plain.add_representer(str, _Plain.represent_str)
