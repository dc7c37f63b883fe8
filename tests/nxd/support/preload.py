"""Preload of the server process from which ranks are forked: NxD, without a device."""

from tests.nxd.support import stand_ins

stand_ins.install()

import neuronx_distributed  # noqa: E402, F401  # after the stand-ins
