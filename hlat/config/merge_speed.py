"""Work that OmegaConf repeats while it builds and merges a configuration, done once.

Both functions replace a private method while they run, since OmegaConf has no option for it. Other
threads that use them wait.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf.base import Box, Node

_OMITS_COPIES = "no_deepcopy_set_nodes"
"""OmegaConf's flag to store a node in a container without a copy."""
_lock = threading.RLock()


@contextmanager
def omit_node_copies() -> Iterator[None]:
    """Set `no_deepcopy_set_nodes` for all containers.

    OmegaConf does not pass the flag to nested dataclasses, so it copies a node once per level.
    """
    get_flag = Node._get_flag

    def get_flag_without_copies(node: Node, flag: str) -> bool | None:
        return True if flag == _OMITS_COPIES else get_flag(node, flag)

    with _replace_method(Node, get_flag_without_copies, "_get_flag"):
        yield


@contextmanager
def defer_parents() -> Iterator[None]:
    """Do not correct the parents of all nodes after each merge.

    Call `_re_parent` of the merged configuration after the last one.
    """
    with _replace_method(Box, lambda _: None, "_re_parent"):
        yield


@contextmanager
def _replace_method(owner: type, method: Any, name: str) -> Iterator[None]:
    with _lock:
        original = getattr(owner, name)
        setattr(owner, name, method)
        try:
            yield
        finally:
            setattr(owner, name, original)
