"""MFU and cost against published figures."""

import pytest

from hlat.config.hardware import HardwareConfig
from hlat.config.mfu import (
    compute_cost_per_4m_tokens,
    compute_link_bandwidth,
    compute_mfu,
    compute_peak_flops,
)
from hlat.config.model import ModelConfig
from hlat.config.precision import Dtype
from hlat.model.decoder_spec import compute_flops_per_token

LLAMA_7B = ModelConfig("7b", 32, 4096, 11008, 32, 32, 32000)
LLAMA_13B = ModelConfig("13b", 40, 5120, 13824, 40, 40, 32000)


def trn1(nodes: int, price: float | None = 21.5) -> HardwareConfig:
    return HardwareConfig(
        "trn1.32xlarge",
        nodes=nodes,
        processes_per_node=32,
        peak_tflops={"bf16": 95.0},
        price_usd_per_hour=price,
    )


def test_peak_of_the_run() -> None:
    assert compute_peak_flops(trn1(4), 128, Dtype.bf16) == pytest.approx(4 * 3040e12)


@pytest.mark.parametrize(
    ("model", "sequences_per_second", "published"), [(LLAMA_7B, 82, 14.8), (LLAMA_13B, 60, 20.7)]
)
def test_mfu_that_neuron_publishes(
    model: ModelConfig, sequences_per_second: float, published: float
) -> None:
    result = compute_mfu(
        sequences_per_second * 4096,
        compute_flops_per_token(model, 4096),
        trn1(32),
        1024,
        Dtype.bf16,
    )
    assert result is not None
    assert 100 * result == pytest.approx(published, abs=0.15)


@pytest.mark.parametrize(
    ("nodes", "tokens_per_second", "usd"),
    [(4, 109.5e3, 0.87), (32, 760e3, 1.005), (64, 1.27e6, 1.207)],
)
def test_cost_of_hlat_7b(nodes: int, tokens_per_second: float, usd: float) -> None:
    assert compute_cost_per_4m_tokens(trn1(nodes), tokens_per_second) == pytest.approx(
        usd, rel=5e-3
    )


def test_unknown_values_are_none() -> None:
    assert compute_peak_flops(trn1(1), 32, Dtype.fp32) is None
    assert compute_mfu(1e6, 1e9, trn1(1), 32, Dtype.fp32) is None
    assert compute_cost_per_4m_tokens(trn1(1, price=None), 1e6) is None


def test_link_bandwidth_within_and_between_nodes() -> None:
    node = HardwareConfig(
        "x", nodes=2, processes_per_node=4, link_gb_per_s=100.0, network_gbit_per_s=800.0
    )
    assert compute_link_bandwidth(node, [4, 5, 6, 7]) == 100e9
    assert compute_link_bandwidth(node, [3, 4]) == 800e9 / 8 / 4
    assert (
        compute_link_bandwidth(HardwareConfig("x", nodes=2, processes_per_node=4), [0, 1]) is None
    )
    assert (
        compute_link_bandwidth(HardwareConfig("x", nodes=2, processes_per_node=4), [0, 4]) is None
    )
    assert (
        compute_link_bandwidth(
            HardwareConfig("x", nodes=1, processes_per_node=None, link_gb_per_s=1.0), [0, 400]
        )
        == 1e9
    )
