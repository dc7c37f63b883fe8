"""Files for programs that read YAML, written from plain data."""

from typing import Any

import yaml


def as_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as one YAML file, in the order of their keys, each value written out."""
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)
    assert isinstance(text, str)
    return text


class _Plain(yaml.SafeDumper):
    """Repeats a part that occurs twice: an alias would be read by few."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
