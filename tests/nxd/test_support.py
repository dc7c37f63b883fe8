"""Support of the other tests: collectives, processes, stand-ins."""

import pytest
import torch

from tests.nxd.support.ranks import MODES, RankError, require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()


@pytest.mark.parametrize("mode", MODES)
def test_collectives_follow_torch_xla(mode: str) -> None:
    """Use unordered groups {0, 2} and {1, 3}, and integers, so equality is exact."""
    tensors = [torch.arange(8.0).reshape(2, 4) + 10 * rank for rank in range(4)]
    found = run(4, "support.collectives", tensors, [[2, 0], [1, 3]], mode=mode)
    for rank, of_rank in enumerate(found):
        pair = [tensors[rank % 2], tensors[rank % 2 + 2]]
        second = rank // 2
        total, halves = pair[0] + pair[1], slice(2 * second, 2 * second + 2)
        wanted = {
            "sum": total,
            "largest": tensors[3],
            "half_sum_in_place": total / 2,
            "gathered": torch.cat(pair, 1),
            "scattered": 2 * total[:, halves],
            "exchanged": torch.cat([tensor[:, halves] for tensor in pair]),
            "from_the_rank_before": tensors[rank - 1] if rank else torch.zeros(2, 4),
            "afterwards": tensors[rank],
        }
        for name, tensor in wanted.items():
            assert torch.equal(of_rank[name], tensor), (rank, name)


@pytest.mark.parametrize("mode", MODES)
def test_reduce_scatter_does_not_change_its_input(mode: str) -> None:
    for rank, given in enumerate(run(2, "support.reduced_input", mode=mode)):
        assert torch.equal(given, torch.full((4, 2), float(rank)))


@pytest.mark.parametrize("mode", MODES)
def test_rendezvous_gathers_payloads(mode: str) -> None:
    everything = [b"from 0", b"from 1", b"", b""]
    assert run(2, "support.payloads", b"from ", mode=mode) == [everything, everything]


@pytest.mark.parametrize(("mode", "device"), [("gloo", "cpu"), ("xla", "xla")])
def test_ranks_have_the_environment_of_torchrun(mode: str, device: str) -> None:
    found = run(2, "support.environment", mode=mode)
    for rank, seen in enumerate(found):
        assert seen == {
            "rank": rank,
            "device": device,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "NXD_CPU_MODE": str(int(mode == "gloo")),
        }


def test_stand_in_raises_with_its_name() -> None:
    with pytest.raises(RankError, match=r"base\.xla_call is part of the Neuron SDK"):
        run(1, "support.kernel")


def test_error_contains_the_output_of_the_failed_rank() -> None:
    with pytest.raises(RankError, match="rank 1 has failed") as error:
        run(2, "support.one_fails")
    assert "the second rank speaks" in str(error.value)
    assert "ValueError: on purpose" in str(error.value)


def test_busy_ranks_have_more_time() -> None:
    assert run(1, "support.works_for", 12.0, seconds=6) == [True]


def test_hanging_ranks_are_killed_with_a_traceback() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] have not answered in time") as error:
        run(2, "support.one_hangs", seconds=30)
    assert "the first rank speaks" in str(error.value)
    assert "in one_hangs" in str(error.value)
