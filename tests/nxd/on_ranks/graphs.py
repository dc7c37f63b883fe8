"""Graphs of a run, traced but not executed."""

import hashlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hlat.checkpoint.checkpointer import Checkpointer
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences, compute_document_ids
from hlat.engine.device_checks import BurnInConfig
from hlat.engine.nxd.nxd_engine import NxdEngine
from tests.distributed.checks import EOS, RATE, batches, shard_batch
from tests.nxd.support.graphs import recorded

Phase = tuple[str, list[str], int]
"""Name, ordered digests of its graphs, and number of reads by the host."""
STARTS = {
    "first": "check build evaluate step read step read step save step read traced_save step read",
    "restart": "check build restore step read step evaluate read save step read",
}
"""Phases of a new run, as precompile traces it, and of a run from a checkpoint."""


def graphs(config: Config, start: str) -> list[Phase]:
    """Return the phases of a run with a start of STARTS."""
    phases: list[Phase] = []
    with recorded() as recorder:
        run = _Run(config)
        for phase in STARTS[start].split():
            getattr(run, phase)()
            digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in recorder.graphs]
            phases.append((phase, digests, len(recorder.reads)))
            recorder.graphs.clear()
            recorder.reads.clear()
    return phases


class _Run:
    """Calls of hlat.train to an engine."""

    def __init__(self, config: Config) -> None:
        self.config, self.engine, self.steps = config, NxdEngine(), 0
        self.batch = batches(config, 1)[0]
        self.metrics: Any = None

    def check(self) -> None:
        burn_in = BurnInConfig(128, 0.0, 1 << 12)
        with mock.patch("hlat.engine.device_checks._ACCELERATOR_BURN_IN", burn_in):
            self.engine.run_device_checks(self.config)

    def build(self) -> None:
        self.engine.build(self.config)

    def evaluate(self) -> None:
        sequences = PackedSequences(self.batch, compute_document_ids(self.batch, EOS))
        self.engine.read_metrics(self.engine.eval_step(sequences))

    def step(self) -> None:
        self.steps += 1
        rate = 0.0 if self.steps == 1 else RATE / self.steps
        self.metrics = self.engine.train_step(shard_batch(self.batch, self.engine), rate)

    def read(self) -> None:
        self.engine.read_metrics(self.metrics)

    def save(self) -> None:
        self.engine.find_replica_mismatches()
        for shard in self.engine.state_shards():
            shard.tensor.clone()

    def traced_save(self) -> None:
        Checkpointer._trace_save_and_restore(SimpleNamespace(_engine=self.engine))

    def restore(self) -> None:
        with torch.no_grad():
            for shard in self.engine.state_shards():
                shard.tensor.copy_(torch.full_like(shard.tensor, 7))
