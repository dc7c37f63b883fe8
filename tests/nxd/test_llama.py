"""hlat's Llama on NxD's layers and pipeline equals hlat's Llama in one process."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hlat.config.model import ModelConfig
from hlat.model.decoder import Decoder
from tests.nxd.support.ranks import require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()

LLAMA = ModelConfig("tiny", 2, 32, 48, 4, 2, 64)


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    named = Decoder(LLAMA).named_parameters()
    return {name: torch.randn(p.shape, generator=generator) * 0.2 for name, p in named}


@pytest.mark.parametrize(
    ("size", "tp", "sequence_parallel", "mode"),
    [
        *((2, 2, sp, "gloo") for sp in (False, True)),
        (2, 1, False, "gloo"),
        *((4, 2, sp, "gloo") for sp in (False, True)),
        (4, 2, True, "xla"),
    ],
)
def test_llama_on_nxd_layers_equals_one_process(
    size: int, tp: int, sequence_parallel: bool, mode: str
) -> None:
    """Coalesced weights are sharded by consecutive rows, activations along dimension 1, and NxD's
    pipeline traces the layers. Loss, gradients and their norm agree to 1e-5. With sequence
    parallelism, the gradients of norms are partial sums until step()."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 64, (2, 4, 8), generator=generator)
    arguments = (LLAMA, _weights(), (tokens, targets), tp, sequence_parallel)
    found = run(size, "llama.train", *arguments, mode=mode)

    plain = Decoder(LLAMA)
    plain.load_state_dict(_weights())
    loss = functional.cross_entropy(plain.compute_logits(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for of_rank in found[-tp:]:
        assert of_rank["loss"] == pytest.approx(loss.item(), rel=1e-5)
    seen = set()
    for stage in range(0, size, tp):
        for name in found[stage]["grads"]:
            parts = [of_rank["grads"][name] for of_rank in found[stage : stage + tp]]
            if name.endswith("norm.weight"):
                full = sum(parts) if sequence_parallel else parts[0]
            else:
                full = torch.cat(parts, int(name.endswith(("o_proj.weight", "down_proj.weight"))))
            assert (full - grads[name]).norm() < 1e-5 * grads[name].norm(), name
            seen.add(name)
    assert seen == set(grads)
    assert all(of_rank["norm"] == pytest.approx(norm.item(), rel=1e-5) for of_rank in found)
