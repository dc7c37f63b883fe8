"""Agent of TorchElastic that reports the state of the workers to the supervisor.

All private names of TorchElastic are used here, as in torch 2.9 and 2.13. TorchElastic has neither
a callback for the state of the workers nor a method that prevents restarts.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs


class WorkerAgent(LocalElasticAgent):
    """Agent that calls `check_workers` with their state ten times a second.

    TorchElastic continues with the state that the function returns: failed workers are restarted
    or, without remaining restarts, stopped.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        check_workers: Callable[[RunResult], RunResult],
        **options: Any,
    ) -> None:
        super().__init__(spec, logs_specs, **options)
        self._check_workers = check_workers
        # TorchElastic logs every exit code but 0 as an error, after the message of the run itself
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
            logging.CRITICAL
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers; an abstract method of SimpleElasticAgent, whose loop calls it."""
        return self._check_workers(super()._monitor_workers(worker_group))

    @property
    def remaining_restarts(self) -> int:
        """Number of restarts before TorchElastic returns a failure; a subclass can reduce it."""
        return int(self._remaining_restarts)

    def prevent_restarts(self) -> None:
        """Make TorchElastic stop failed workers; their limit is read before the first start."""
        self._remaining_restarts = 0
