"""Peers receive what their leader draws, tokenise nothing, and fail as it does."""

import json
import multiprocessing
import socket
import struct

import numpy as np
import pytest

from hlat.config.batch import Batch
from hlat.config.errors import ConfigError
from hlat.config.phase import Phase, Stage
from hlat.data import loader as loader_module
from hlat.data import streams
from hlat.data.producer import WorkerDiedError

PHASE, BATCH = (
    Phase("p", [Stage("one", 3 * 128), Stage("two", None, {"beta": 1.0})]),
    Batch(4, 1, 32),
)


class Sockets:
    """A group of processes around pairs of sockets."""

    def __init__(self, leads, ends):
        self.leads, self.ends = leads, ends

    def broadcast(self, message):
        if self.leads:
            for end in self.ends:
                end.sendall(struct.pack("q", len(message)) + message)
            return message
        (size,) = struct.unpack("q", self.ends[0].recv(8, socket.MSG_WAITALL))
        return self.ends[0].recv(size, socket.MSG_WAITALL)


def be_a_peer(data, end, state, steps, answers):
    def refuse(*_):
        raise AssertionError("a peer tokenised")

    streams.next_sequences = loader_module.Rows.draw = refuse
    group = Sockets(False, [end])
    loader = loader_module.open_loader(data, PHASE, BATCH, 1, rank=1, num_ranks=2, peers=group)
    if state is not None:
        loader.restore(state)
    tokens = [loader.next().tokens for _ in range(steps)]
    try:
        loader.next()
        problem = None
    except (ConfigError, WorkerDiedError) as error:
        problem = f"{type(error).__name__}: {error}"
    answers.put((tokens, json.loads(json.dumps(loader.state())), loader.stage, problem))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_peers_receive_batches_states_and_errors(corpora, open_loader, workers: int) -> None:
    data = corpora.data(workers=workers, prefetch=1)
    whole = open_loader(data, PHASE, BATCH, rank=1, num_ranks=2)
    whole.next()
    start = whole.state()
    context = multiprocessing.get_context("fork")
    answers, pairs = context.Queue(), [socket.socketpair() for _ in range(2)]
    peers = [
        context.Process(target=be_a_peer, args=(data, theirs, start, 5, answers))
        for _, theirs in pairs
    ]
    for peer in peers:
        peer.start()
    group = Sockets(True, [ours for ours, _ in pairs])
    leader = open_loader(data, PHASE, BATCH, rank=1, num_ranks=2, peers=group)
    leader.restore(start)
    expected = [whole.next().tokens for _ in range(5)]
    found = [leader.next().tokens for _ in range(5)]
    state, stage = json.loads(json.dumps(leader.state())), leader.stage
    leader._producer._producer.start = lambda point: (_ for _ in ()).throw(
        ConfigError("a file is gone")
    )
    leader._started = False
    with pytest.raises(ConfigError, match="a file is gone"):
        leader.next()
    np.testing.assert_array_equal(found, expected)
    for _ in peers:
        tokens, *rest = answers.get(timeout=60)
        np.testing.assert_array_equal(tokens, expected)
        assert rest == [state, stage, "ConfigError: a file is gone"]
    for peer in peers:
        peer.join()
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
