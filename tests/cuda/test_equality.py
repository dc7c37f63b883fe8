"""A step on a device equals the same step on the CPU."""

import pytest
import torch

from hlat.model import attention_kernels
from hlat.model.attention_kernels import KeyRange, attend, build_masks
from tests.distributed import checks
from tests.support.model_components import COMPONENTS, WINDOWS

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

TOLERANCES = {"loss": 2e-3, "grad_norm": 3e-2, "param_norm": 2e-3}
"""Largest relative difference of recipes with bf16, as between bf16 and fp32 on the CPU."""
DOCUMENTS = ["data.document_mask=true", "data.loss_mask=true"]
MASKS = {
    "documents": DOCUMENTS,
    "window": [*DOCUMENTS, *WINDOWS.split()],
    "softcap": [*DOCUMENTS, "model.attention.logit_softcap=2"],
    "sinks": [*DOCUMENTS, "model.attention.sinks=true"],
}


def compare_fp32(found, expected) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mixed", "bf16_sr", "bf16_sr_master"])
def test_recipe_equals_the_cpu(configure, device, recipe) -> None:
    found, expected = (
        checks.train(configure(name, f"precision={recipe}"), 3) for name in (device, "cpu")
    )
    if recipe == "fp32":
        compare_fp32(found, expected)
        return
    for row, other in zip(found[:-1], expected[:-1], strict=True):
        for value, wanted, tolerance in zip(row, other, TOLERANCES.values(), strict=False):
            assert value == pytest.approx(wanted, rel=tolerance)
    assert found[-1] == pytest.approx(expected[-1], rel=TOLERANCES["loss"])


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_equals_the_cpu(configure, device, component) -> None:
    settings = COMPONENTS[component].split()
    compare_fp32(*(checks.train(configure(name, *settings), 2) for name in (device, "cpu")))


@pytest.mark.parametrize("mask", MASKS)
def test_document_mask_equals_the_cpu(configure, device, mask) -> None:
    compare_fp32(*(checks.train(configure(name, *MASKS[mask]), 2) for name in (device, "cpu")))


@pytest.mark.parametrize("mask", [[], MASKS["window"]], ids=["causal", "documents and window"])
def test_compiled_equals_eager(configure, device, mask) -> None:
    compare_fp32(
        checks.train(configure(device, "compiler=inductor", *mask), 2),
        checks.train(configure(device, *mask), 2),
    )


@pytest.mark.parametrize("window", [None, 50])
def test_attention_within_documents_equals_the_cpu(device, window) -> None:
    """Use sequences of several blocks of FlexAttention, the last one incomplete."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 300, 32), (2, 2, 300, 32), (2, 2, 300, 32), (2, 4, 300, 32)]
    *inputs, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    documents = torch.randint(0, 12, (2, 300), generator=generator).sort(1).values
    results = []
    for name in (device, "cpu"):
        starts = attention_kernels.compute_document_starts(documents.to(name))
        masks = build_masks(
            KeyRange(starts), [window], (2, 300, 300), torch.float32, torch.device(name)
        )
        leaves = [each.to(name).requires_grad_() for each in inputs]
        y = attend(*leaves, 32**-0.5, masks, window)
        y.backward(grad.to(name))
        results.append([y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
