"""Act as another user, in tests that run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def act_as_nobody() -> Iterator[None]:
    """Have the permissions of the user `nobody`; modules must have been imported before."""
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)
