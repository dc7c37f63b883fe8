"""The store that the processes of one machine meet in."""

from datetime import timedelta

from torch.distributed import TCPStore

from hlat.recovery.rendezvous import LocalRendezvous


def test_the_store_is_where_it_says_and_every_round_begins_anew() -> None:
    meeting = LocalRendezvous("x")
    first = meeting.next_rendezvous()
    assert (first.rank, first.world_size) == (0, 1)
    first.store.set("key", "value")
    place = first.bootstrap_store_info
    assert place.master_addr == "127.0.0.1"
    client = TCPStore(
        place.master_addr,
        place.master_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    assert client.get("x/1/key") == b"value"
    second = meeting.next_rendezvous()
    assert second.bootstrap_store_info == place
    assert not second.store.check(["key"])


def test_nobody_joins_and_nothing_ends_it() -> None:
    meeting = LocalRendezvous("x")
    meeting.set_closed()
    assert not meeting.is_closed()
    assert meeting.num_nodes_waiting() == 0
    assert meeting.shutdown()
    assert (meeting.get_backend(), meeting.get_run_id()) == ("static", "x")
    assert meeting.use_agent_store
