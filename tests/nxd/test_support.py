"""The ground that the other tests stand on: collectives, processes, stand-ins."""

import pytest
import torch

from tests.nxd.support.ranks import MODES, RankError, require_nxd, run

pytestmark = pytest.mark.nxd
require_nxd()


@pytest.mark.parametrize("mode", MODES)
def test_collectives_do_what_torch_xla_says(mode: str) -> None:
    """Groups {0, 2} and {1, 3}, listed in any order; whole numbers, so equality is exact."""
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
def test_nxds_reduce_scatter_leaves_its_input_alone(mode: str) -> None:
    for rank, given in enumerate(run(2, "support.reduced_input", mode=mode)):
        assert torch.equal(given, torch.full((4, 2), float(rank)))


@pytest.mark.parametrize("mode", MODES)
def test_a_rendezvous_waits_for_all_and_carries_what_they_bring(mode: str) -> None:
    everything = [b"from 0", b"from 1", b"", b""]
    assert run(2, "support.payloads", b"from ", mode=mode) == [everything, everything]


@pytest.mark.parametrize(("mode", "device"), [("gloo", "cpu"), ("xla", "xla")])
def test_ranks_see_what_torchrun_would_set(mode: str, device: str) -> None:
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


def test_what_only_the_neuron_sdk_has_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"base\.xla_call is part of the Neuron SDK"):
        run(1, "support.kernel")


def test_the_last_words_of_a_rank_that_fails_are_told() -> None:
    with pytest.raises(RankError, match="rank 1 has failed") as error:
        run(2, "support.one_fails")
    assert "the second rank speaks" in str(error.value)
    assert "ValueError: on purpose" in str(error.value)


def test_ranks_that_work_have_more_time() -> None:
    assert run(1, "support.works_for", 12.0, seconds=6) == [True]


def test_ranks_that_hang_are_ended_and_tell_where_they_were() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] have not answered in time") as error:
        run(2, "support.one_hangs", seconds=30)
    assert "the first rank speaks" in str(error.value)
    assert "in one_hangs" in str(error.value)
