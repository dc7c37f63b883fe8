"""Check that the ranks read each sequence of the global batch once, also after a resume."""

import hashlib
from collections.abc import Iterator
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.data.data_loader import DataLoader, build_data_loader, merge_state_dicts
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness

_NUM_BATCHES = 3


def check_data(harness: EngineHarness) -> Iterator[CheckResult]:
    """Compare the rows of all ranks with the global batch of one process and with a resumed run."""
    world, group = harness.engine.world, harness.engine.world.world_group
    loaders, problem = _open_loaders(harness)
    try:
        if group.any(problem is not None):
            problems = [message for message in group.gather_object(problem) if message]
            if harness.is_rank0:
                yield skip_check("data", problems[0])
            return
        loader, resumed = loaders
        batches = [_compute_row_digests(loader)]
        states = group.gather_object([world.dp_rank, loader.state_dict()])
        batches += [_compute_row_digests(loader) for _ in range(_NUM_BATCHES - 1)]
        state = merge_state_dicts([*dict(states).values()]) if harness.is_rank0 else None
        resumed.load_state_dict(harness.broadcast_object(state))
        resumed_batches = [_compute_row_digests(resumed) for _ in range(_NUM_BATCHES - 1)]
        is_resume_equal = resumed_batches == batches[1:]
        reports = group.gather_object([world.dp_rank, batches, is_resume_equal])
    finally:
        for loader in loaders:
            loader.close()
    if harness.is_rank0:
        yield _compare_rows(harness, reports)


def _open_loaders(harness: EngineHarness) -> tuple[list[DataLoader], str | None]:
    """Return two loaders of this rank, or the problem."""
    config, loaders = harness.config, list[DataLoader]()
    settings = (config.data, config.phase, config.batch, config.run.seed)
    try:
        for _ in range(2):
            loaders.append(build_data_loader(*settings, *harness.engine.world.data_shard))
    except ConfigError as error:
        return loaders, error.problems[0]
    return loaders, None


def _compute_row_digests(loader: DataLoader) -> list[str]:
    """Return a digest of each row of the next batch."""
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in loader.next_batch().tokens]


def _compare_rows(harness: EngineHarness, reports: list[Any]) -> CheckResult:
    """Compare the data-parallel rank, rows and resume result of each rank."""
    config, dp = harness.config, harness.engine.world.dp_size
    by_rank: dict[int, Any] = {}
    faults = []
    for rank, batches, _ in reports:
        if by_rank.setdefault(rank, batches) != batches:
            faults.append(FaultLocation("rows of peers", "tp+pp"))
    loader = build_data_loader(config.data, config.phase, config.batch, config.run.seed)
    global_batches = [_compute_row_digests(loader) for _ in range(_NUM_BATCHES)]
    loader.close()
    for i, rows in enumerate(global_batches):
        if any(by_rank[rank][i] != rows[rank::dp] for rank in by_rank):
            faults.append(FaultLocation(f"rows of batch {i}", "dp"))
    all_rows = [row for batches in by_rank.values() for rows in batches for row in rows]
    if len({*all_rows}) < len(all_rows):
        faults.append(FaultLocation("rows that are read twice", "dp"))
    if not all(is_resume_equal for _, _, is_resume_equal in reports):
        faults.append(FaultLocation("rows after a resume", "data"))
    return build_result(
        "data",
        faults,
        f"{len(all_rows)} sequences in {_NUM_BATCHES} batches are read once each by {dp} "
        "data-parallel ranks, and again after a resume",
        ", ".join(dict.fromkeys(f"{fault.part} ({fault.axis})" for fault in faults))
        + " differ from the global batch",
    )
