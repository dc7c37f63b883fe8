"""Test batches, states and errors broadcast from rank 0 of a group."""

import json
import multiprocessing
import socket
import struct

import numpy as np
import pytest

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data import data_loader as loader_module
from hlat.data import token_streams
from hlat.data.batch_producer import WorkerDiedError

PHASE, BATCH = (
    PhaseConfig("p", [PhaseStage("one", 3 * 128), PhaseStage("two", None, {"beta": 1.0})]),
    BatchConfig(4, 1, 32),
)


class Sockets:
    """Process group connected by pairs of sockets."""

    def __init__(self, is_rank0, ends):
        self.is_rank0, self.ends = is_rank0, ends

    def broadcast(self, message):
        if self.is_rank0:
            for end in self.ends:
                end.sendall(struct.pack("q", len(message)) + message)
            return message
        (size,) = struct.unpack("q", self.ends[0].recv(8, socket.MSG_WAITALL))
        return self.ends[0].recv(size, socket.MSG_WAITALL)


def run_peer(data, end, state, steps, answers):
    def refuse(*_):
        raise AssertionError("a peer tokenised")

    token_streams.read_next_sequences = loader_module.BatchReader.read_batch = refuse
    group = Sockets(False, [end])
    loader = loader_module.build_data_loader(
        data, PHASE, BATCH, 1, dp_rank=1, dp_world_size=2, model_parallel_group=group
    )
    if state is not None:
        loader.load_state_dict(state)
    tokens = [loader.next_batch().tokens for _ in range(steps)]
    try:
        loader.next_batch()
        problem = None
    except (ConfigError, WorkerDiedError) as error:
        problem = f"{type(error).__name__}: {error}"
    answers.put((tokens, json.loads(json.dumps(loader.state_dict())), loader.stage_name, problem))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_peers_receive_batches_states_and_errors(corpora, open_loader, workers: int) -> None:
    data = corpora.data(workers=workers, prefetch=1)
    whole = open_loader(data, PHASE, BATCH, dp_rank=1, dp_world_size=2)
    whole.next_batch()
    start = whole.state_dict()
    context = multiprocessing.get_context("fork")
    answers, pairs = context.Queue(), [socket.socketpair() for _ in range(2)]
    peers = [
        context.Process(target=run_peer, args=(data, theirs, start, 5, answers))
        for _, theirs in pairs
    ]
    for peer in peers:
        peer.start()
    group = Sockets(True, [ours for ours, _ in pairs])
    leader = open_loader(data, PHASE, BATCH, dp_rank=1, dp_world_size=2, model_parallel_group=group)
    leader.load_state_dict(start)
    expected = [whole.next_batch().tokens for _ in range(5)]
    found = [leader.next_batch().tokens for _ in range(5)]
    state, stage = json.loads(json.dumps(leader.state_dict())), leader.stage_name
    leader._producer._producer.start = lambda point: (_ for _ in ()).throw(
        ConfigError("a file is gone")
    )
    leader._started = False
    with pytest.raises(ConfigError, match="a file is gone"):
        leader.next_batch()
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
