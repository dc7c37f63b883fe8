"""Configurations of the tests marked cuda."""

import pytest
import torch

from hlat.config.resolve import resolve_config
from tests.distributed import checks


@pytest.fixture(autouse=True)
def _fresh_compiler(device):
    """Discard compiled code of other tests, and require fp32 matmuls without TF32."""
    assert torch.get_float32_matmul_precision() == "highest"
    torch.compiler.reset()


@pytest.fixture
def configure(compose):
    """Configure a small model on a device: configure("cuda", "precision=bf16")."""
    size = [*checks.MODEL, "model.num_layers=2", "batch.micro_batch_size=4"]

    def make(device, *overrides):
        return resolve_config(compose(*size, f"engine.device={device}", *overrides))

    return make
