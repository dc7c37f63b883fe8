"""Environment of OpenMP that entry points set before torch is imported."""

import os
from unittest import mock

import pytest

from hlat.config import entry_point

SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, SPINNING),
        ({"GOMP_SPINCOUNT": "7"}, SPINNING | {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        (SPINNING, SPINNING),  # a worker process
    ],
)
def test_policy_of_the_user_is_kept(before: dict[str, str], after: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, before, clear=True):
        entry_point._limit_openmp_waiting()
        assert dict(os.environ) == after
