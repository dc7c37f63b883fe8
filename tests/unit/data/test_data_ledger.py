"""Test that the ledger equals the tokens read, for any ranks and resumes."""

import json

import numpy as np

from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data.data_loader import merge_state_dicts

STAGES = [
    PhaseStage("one", 10 * 128, {"alpha": 0.5, "beta": 0.5}),
    PhaseStage("two", 7 * 128, {"beta": 0.2, "gamma": 0.8}),
    PhaseStage("three", None, {"alpha": 1.0}),
]


def test_ledger_by_stage_is_independent_of_ranks_and_resumes(corpora, open_loader) -> None:
    phase = PhaseConfig("p", STAGES)
    uninterrupted = open_loader(corpora.data(), phase)
    for _ in range(25):
        uninterrupted.next_batch()
    expected = uninterrupted.compute_ledger_by_stage()
    assert [(stage["name"], stage["start"]) for stage in expected] == [
        ("one", 0),
        ("two", 10),
        ("three", 17),
    ]
    for stage, steps in zip(expected, (10, 7, 8), strict=True):
        assert sum(entry["tokens"] for entry in stage["sources"].values()) == steps * 128
    assert expected[0]["sources"]["gamma"]["tokens"] == 0
    assert expected[1]["sources"]["alpha"]["tokens"] == 0
    assert abs(expected[1]["sources"]["gamma"]["tokens"] - 0.8 * 7 * 128) <= 4 * 128
    state = None
    for num_ranks, steps in ((2, 4), (4, 9), (1, 6), (2, 6)):
        ranks = [
            open_loader(corpora.data(), phase, dp_rank=r, dp_world_size=num_ranks)
            for r in range(num_ranks)
        ]
        for one in ranks:
            if state is not None:
                one.load_state_dict(json.loads(state))
            for _ in range(steps):
                one.next_batch()
        state = json.dumps(merge_state_dicts([one.state_dict() for one in ranks]))
    summed = [one.compute_ledger_by_stage() for one in ranks]
    for stage, *parts in zip(expected, *summed, strict=True):
        for name, entry in stage["sources"].items():
            for key in ("tokens", "documents"):
                assert sum(part["sources"][name][key] for part in parts) == entry[key]
    last = open_loader(corpora.data(), phase)
    last.load_state_dict(json.loads(state))
    assert last.compute_ledger_by_stage() == expected
    assert last.compute_ledger() == uninterrupted.compute_ledger()


def test_ledger_counts_complete_documents(corpora, open_loader) -> None:
    loader = open_loader(corpora.data())
    batches = [loader.next_batch().tokens for _ in range(60)]
    ended = int((np.concatenate(batches, axis=1) == loader.eos_token_id).sum())
    assert sum(entry["documents"] for entry in loader.compute_ledger().values()) == ended
