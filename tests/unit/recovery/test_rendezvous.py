"""Rendezvous of the processes on one machine."""

from datetime import timedelta

from torch.distributed import TCPStore

from hlat.recovery.rendezvous import LocalRendezvous


def test_the_store_is_at_its_endpoint_and_each_round_has_a_new_prefix() -> None:
    rendezvous = LocalRendezvous("x")
    first = rendezvous.next_rendezvous()
    assert (first.rank, first.world_size) == (0, 1)
    first.store.set("key", "value")
    store_info = first.bootstrap_store_info
    assert store_info.master_addr == "127.0.0.1"
    client = TCPStore(
        store_info.master_addr,
        store_info.master_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    assert client.get("x/1/key") == b"value"
    second = rendezvous.next_rendezvous()
    assert second.bootstrap_store_info == store_info
    assert not second.store.check(["key"])


def test_no_node_joins_and_the_rendezvous_never_closes() -> None:
    rendezvous = LocalRendezvous("x")
    rendezvous.set_closed()
    assert not rendezvous.is_closed()
    assert rendezvous.num_nodes_waiting() == 0
    assert rendezvous.shutdown()
    assert (rendezvous.get_backend(), rendezvous.get_run_id()) == ("static", "x")
    assert rendezvous.use_agent_store
