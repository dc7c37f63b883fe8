"""Imported once by the server that ranks are forked from: NxD, which takes seconds, and no device."""

from tests.nxd.support import stand_ins

stand_ins.install()

import neuronx_distributed  # noqa: E402, F401  # after the names that it asks for
