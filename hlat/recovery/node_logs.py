"""Log files of the workers of one node.

A shared file system handles one file per node of a large run, but not one per rank. Workers write
to files on a disk of the node, and TorchElastic merges their lines with a prefix of the rank.
"""

import os
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest


class NodeLogs(DefaultLogsSpecs):
    """Log destinations: rank 0 to the console; stderr of other ranks to a file and the console.

    Attributes:
        log_path: Merged stderr of the node's ranks except rank 0.
    """

    def __init__(
        self,
        logs_dir: Path,
        local_dir: Path,
        node_rank: int,
        before_start: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(str(logs_dir))
        self.log_path = logs_dir / f"node_{node_rank}.log"
        self._local_dir, self._before_start = local_dir, before_start

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destinations of each worker's output; called just before they start."""
        self._before_start()
        destination = LogsDest()
        log = self.log_path
        if log.exists() and (info := log.stat()).st_size:  # of an earlier attempt
            log.rename(log.with_suffix(f".{info.st_mtime_ns // 10**9}.log"))
        for i, variables in envs.items():
            rank = int(variables["RANK"])
            local_log = self._local_dir / f"rank_{rank}.log"
            local_log.unlink(missing_ok=True)
            destination.stdouts[i] = os.devnull if rank else ""
            destination.stderrs[i] = str(local_log) if rank else ""
            if rank:
                destination.tee_stderrs[i] = str(local_log)
                destination.filtered_stderr = str(log)
            destination.error_files[i] = os.devnull
        return destination
