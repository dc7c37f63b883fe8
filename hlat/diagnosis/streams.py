"""Whether all ranks together read each sequence of the global batch once, also after a resume."""

import hashlib
from typing import Any

from hlat.config.errors import ConfigError
from hlat.data.loader import Loader, merge_states, open_loader
from hlat.diagnosis.patient import Patient
from hlat.diagnosis.verdict import Culprit, Outcome, judged, not_applicable

_BATCHES = 3


def check_data(patient: Patient) -> list[Outcome]:
    """Rows of ranks against the global batch that one process draws, and against a resumed run."""
    world = patient.engine.world
    loaders, problem = _open(patient)
    try:
        if world.everyone.any(problem is not None):
            problems = [one for one in world.everyone.collect(problem) if one]
            return [not_applicable("data", problems[0])] if patient.leads else []
        loader = loaders[0]
        drawn = [_digests(loader)]
        states = world.everyone.collect([world.dp_rank, loader.state()])
        drawn += [_digests(loader) for _ in range(_BATCHES - 1)]
        merged = merge_states([*dict(states).values()]) if patient.leads else None
        resumed = loaders[1]
        resumed.restore(patient.tell(merged))
        goes_on = [_digests(resumed) for _ in range(_BATCHES - 1)] == drawn[1:]
        told = world.everyone.collect([world.dp_rank, drawn, goes_on])
    finally:
        for one in loaders:
            one.close()
    return [_judge(patient, told)] if patient.leads else []


def _open(patient: Patient) -> tuple[list[Loader], str | None]:
    """Two loaders of this rank; or none, and why."""
    config, share = patient.config, patient.engine.world.share
    loaders: list[Loader] = []
    try:
        for _ in range(2):
            settings = (config.data, config.phase, config.batch, config.run.seed)
            loaders.append(open_loader(*settings, *share))
    except ConfigError as error:
        return loaders, error.problems[0]
    return loaders, None


def _digests(loader: Loader) -> list[str]:
    """A digest of each row of the next batch."""
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in loader.next().tokens]


def _judge(patient: Patient, told: list[Any]) -> Outcome:
    """What each rank has told: its data-parallel rank, its rows, whether a resume goes on."""
    config, dp = patient.config, patient.engine.world.dp_size
    by_rank: dict[int, Any] = {}
    wrong = []
    for rank, drawn, _ in told:
        if by_rank.setdefault(rank, drawn) != drawn:
            wrong.append(Culprit("rows of peers", "tp+pp"))
    alone = open_loader(config.data, config.phase, config.batch, config.run.seed)
    whole = [_digests(alone) for _ in range(_BATCHES)]
    alone.close()
    for i, rows in enumerate(whole):
        if any(by_rank[rank][i] != rows[rank::dp] for rank in by_rank):
            wrong.append(Culprit(f"rows of batch {i}", "dp"))
    every = [row for drawn in by_rank.values() for rows in drawn for row in rows]
    if len({*every}) < len(every):
        wrong.append(Culprit("rows that are read twice", "dp"))
    if not all(goes_on for _, _, goes_on in told):
        wrong.append(Culprit("rows after a resume", "data"))
    return judged(
        "data",
        wrong,
        f"{len(every)} sequences in {_BATCHES} batches are read once each by {dp} data-parallel "
        "ranks, and again after a resume",
        ", ".join(dict.fromkeys(f"{one.part} ({one.axis})" for one in wrong))
        + " are not those of the global batch",
    )
