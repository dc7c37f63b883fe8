"""Responses that are not computed again."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hlat.config.config_errors import ConfigError
from hlat.distributed.object_group import SingleRankGroup
from hlat.evaluate import command_broadcast
from hlat.evaluate.command_broadcast import CommandBroadcaster
from hlat.evaluate.request_cache import RequestCache

GREEDY = {"max_new_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 0}


class Model:
    """Model that records its requests and stops with an error after a number of batches."""

    def __init__(self, num_batches: int = 100) -> None:
        self.scored: list[Any] = []
        self.generated: list[tuple[list[int], int]] = []
        self._num_batches = num_batches

    def score(self, requests: Any) -> list[tuple[float, bool]]:
        if not self._num_batches:
            raise KeyboardInterrupt
        self._num_batches -= 1
        self.scored += requests
        return [(-0.1 * sum(context) - sum(answer), not answer) for context, answer in requests]

    def generate(self, prompts: Any, *, sample_ids: Any, **options: Any) -> list[list[int]]:
        self.generated += zip(prompts, sample_ids, strict=True)
        return [[*prompt, i] for prompt, i in zip(prompts, sample_ids, strict=True)]


class Tokenizer:
    end_token_ids = frozenset({0})


def schedule(model: Model, path: Path, fingerprint: str = "model") -> CommandBroadcaster:
    scheduler = CommandBroadcaster(model, Tokenizer(), SingleRankGroup())  # type: ignore[arg-type]
    scheduler.cache = RequestCache(path, fingerprint)
    return scheduler


REQUESTS = [([i, 1], [i]) for i in range(7)] + [([0, 1], [0]), ([5], [])]


def test_an_interrupted_evaluation_continues(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command_broadcast, "_REQUESTS_PER_CACHED_BATCH", 3)
    expected = Model().score(REQUESTS)
    path = tmp_path / "new/cache.db"
    first = schedule(Model(num_batches=2), path)
    with closing(first.cache), pytest.raises(KeyboardInterrupt):
        first.score(REQUESTS, "answers")
    model = Model()
    second = schedule(model, path)
    with closing(second.cache):
        assert second.score(REQUESTS, "answers") == expected
        assert len(model.scored) == len(REQUESTS) - 6
        assert second.cache.num_hits == 6
        model.scored.clear()
        assert second.score(REQUESTS[::-1], "answers") == expected[::-1]
        assert not model.scored


def test_responses_of_other_models_and_settings_are_not_used(tmp_path) -> None:
    path = tmp_path / "cache.db"
    for fingerprint in ("model", "other model"):
        model = Model()
        scheduler = schedule(model, path, fingerprint)
        with closing(scheduler.cache):
            scheduler.score(REQUESTS[:2], "answers")
            scheduler.generate([[1], [2]], ["\n"], GREEDY)
            scheduler.generate([[1], [2]], ["stop"], GREEDY)
            scheduler.generate([[1], [2]], ["\n"], GREEDY | {"max_new_tokens": 5})
        assert len(model.scored) == 2
        assert len(model.generated) == 6


def test_greedy_responses_are_shared_and_samples_are_not(tmp_path) -> None:
    model = Model()
    scheduler = schedule(model, tmp_path / "cache.db")
    with closing(scheduler.cache):
        random = GREEDY | {"temperature": 1.0}
        first = scheduler.generate([[7], [7], [8]], [], random)
        assert first == [[7, 0], [7, 1], [8, 2]]
        assert scheduler.generate([[7], [7], [9]], [], random) == [[7, 0], [7, 1], [9, 2]]
        assert model.generated[3:] == [([9], 2)]
        scheduler.generate([[7]], [], GREEDY)
        scheduler.generate([[8], [7]], [], GREEDY)
        assert model.generated[4:] == [([7], 0), ([8], 0)]


@pytest.mark.parametrize("content", [b"not a database" * 100, None])
def test_other_files_are_rejected(tmp_path, content: bytes | None) -> None:
    path = tmp_path / "cache.db"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"use_cache={path} is not a file for cached responses"):
        RequestCache(path, "model")


def test_damaged_response_is_rejected_and_full_disk_is_ignored(tmp_path, capsys) -> None:
    path = tmp_path / "cache.db"
    scheduler = schedule(Model(), path)
    with closing(scheduler.cache) as cache, closing(sqlite3.connect(path)) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON responses BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
        assert scheduler.score(REQUESTS, "answers") == Model().score(REQUESTS)
        assert f"use_cache={path} cannot be written (disk full)" in capsys.readouterr().err
        other.execute("DROP TRIGGER full")
        cache.save([["a"]], [1])
        other.execute("UPDATE responses SET response = '['")
        other.commit()
        with pytest.raises(ConfigError, match="is not a file for cached responses"):
            cache.load([["a"]])
