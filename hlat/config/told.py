"""A composed configuration as it may be told to a service beyond the run folder.

Whoever looks at a run wants values, not references. But what `${oc.env:...}` stands for may be a
secret, so whatever a resolver would compute stays as it was typed, wherever it is referred to.
"""

import re
from typing import Any

from omegaconf import OmegaConf

_RESOLVER = re.compile(r"\$\{\s*[\w.]+\s*:")


def told(config_yaml: str) -> dict[str, Any]:
    """Return the tree of a configuration with its references to other keys resolved.

    Args:
        config_yaml: What OmegaConf.to_yaml wrote, interpolations as they were typed.
    """
    typed = OmegaConf.to_container(OmegaConf.create(config_yaml), resolve=False)
    tree = OmegaConf.to_container(OmegaConf.create(_inert(typed)), resolve=True)
    assert isinstance(tree, dict), "a configuration is a mapping"
    return {str(key): value for key, value in tree.items()}


def _inert(value: Any) -> Any:
    """Return `value` with every text that asks a resolver escaped."""
    if isinstance(value, dict):
        return {key: _inert(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_inert(item) for item in value]
    if isinstance(value, str) and _RESOLVER.search(value):
        return value.replace("${", r"\${")
    return value
