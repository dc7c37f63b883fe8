"""Whether a saved state is the same one when it is loaded, here and under another layout."""

import numpy as np

from hlat.checkpoint import store
from hlat.diagnosis import precise
from hlat.diagnosis.gradients import widest
from hlat.diagnosis.patient import Patient, Whole, batch, lively
from hlat.diagnosis.shrink import alone
from hlat.diagnosis.verdict import Culprit, Outcome, judged

_RATE = 2.0**-7
_KINDS = ("weights", "exp_avg", "exp_avg_sq", "updates")
_SHOWN = 3

State = dict[str, Whole]


def check_checkpoint(patient: Patient) -> list[Outcome]:
    """Save, spoil, load: every bit is back and the next step is the same; on one process, too."""
    config, world = patient.config, patient.engine.world
    patient.fill(lively(config))
    patient.forget()
    for seed in range(2):
        patient.train(batch(config, seed), _RATE)
    saved, tokens = _state(patient), batch(config, 2)
    with patient.folder() as folder:
        chunks = patient.engine.chunks()
        path = store.save(folder, 2, chunks, {}, world.rank, world.everyone)
        expected = patient.train(tokens, _RATE)
        reached = patient.whole("weights")
        store.restore(path, patient.engine.chunks())
        loaded = _state(patient)
        again = patient.train(tokens, _RATE)
        wrong = _differing(saved, loaded, "here")
        if again.loss != expected.loss or _differing(
            {"weights": reached}, {"weights": patient.whole("weights")}, ""
        ):
            wrong.append(Culprit("next step", "here"))
        gap = 0.0
        if patient.rebuilds and config.num_processes > 1:
            with patient.other(alone(config)) as other:
                store.restore(path, other.engine.chunks())
                wrong += _differing(saved, _state(other), widest(config))
                loss = other.train(tokens, _RATE).loss
                gap = abs(loss - expected.loss) / expected.loss
    if patient.leads and not gap <= precise.of_loss(config):
        wrong.append(Culprit("next step", widest(config)))
    where = "here and on one process" if config.num_processes > 1 else "here"
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return [
        judged(
            "checkpoint",
            wrong,
            f"every bit is back {where}, and the next step is the same",
            "not what was saved: "
            + ", ".join(f"{one.part} ({one.axis})" for one in wrong[:_SHOWN])
            + more,
            next_loss_gap=gap,
        )
    ]


def _state(patient: Patient) -> State:
    return {kind: patient.whole(kind) for kind in _KINDS}


def _differing(saved: State, loaded: State, where: str) -> list[Culprit]:
    """What was saved on this rank's behalf and is not the same any more; on the leader."""
    return [
        Culprit(f"{kind}/{name}", where)
        for kind, tensors in saved.items()
        for name, values in tensors.items()
        if not np.array_equal(values, loaded[kind][name])
    ]
