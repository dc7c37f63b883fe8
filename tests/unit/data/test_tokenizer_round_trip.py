"""Share of text that is lost when it is encoded and decoded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hlat.config.config_errors import ConfigError
from hlat.data import encoder_parity
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer
from hlat.data.tokenizer_round_trip import (
    LostText,
    find_lost_text_problem,
    measure_lost_text,
    merge_lost_text,
    sample_texts,
)


def load_embedded() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(EMBEDDED_FILE))


def build_sentencepiece() -> tokenizers.Tokenizer:
    """Build a tokenizer that prepends a space and encodes unknown characters as bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁": 257}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("build", [load_embedded, build_sentencepiece])
def test_lossless_tokenizers_lose_nothing(build: Callable[[], tokenizers.Tokenizer]) -> None:
    texts = [text.replace("▁", "") for text in encoder_parity.TEXTS]  # it may stand for a space
    texts += ["", " ", " a", "  a  ", "a\n"]
    num_bytes = sum(len(text.encode()) for text in texts)
    assert measure_lost_text(build(), texts) == LostText(num_bytes)


def test_unknown_and_dropped_characters_are_lost() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert measure_lost_text(words, ["the", "the kite, the U"]) == LostText(18, 8, "'U' becomes ''")
    letters = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert measure_lost_text(letters, ["a cab"]) == LostText(5, 1, "'c' becomes ''")


@pytest.mark.parametrize(
    ("change", "num_lost", "example"),
    [
        ({"normalizer": {"type": "NFKC"}}, 5, "'²' becomes '2'"),
        ({"normalizer": {"type": "Lowercase"}}, 3, "'Ä' becomes 'ä'"),
        ({"pre_tokenizer": None}, 10, "'Ä' becomes '\ufffd'"),
    ],
)
def test_changed_characters_are_lost(
    change: dict[str, object], num_lost: int, example: str
) -> None:
    settings = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8")) | change
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
    text = "The ﬁrst ² Äpfel"
    assert measure_lost_text(tokenizer, [text]) == LostText(len(text.encode()), num_lost, example)


def test_messages_have_the_share_an_example_and_the_remedy() -> None:
    lost = LostText(1000, 123, "'c' becomes ''")
    assert find_lost_text_problem("x.json", "the text", lost, 0.123) is None
    assert find_lost_text_problem("x.json", "the text", lost, 0.01) == (
        "x.json loses 12.30% (123 of 1,000 bytes; for example 'c' becomes '') of the text, more "
        "than data.max_lost_text=0.01; use a tokenizer with a token for every byte, as hlat "
        "tokenizer train makes, or if the loss is intended (a normalizer), set "
        "data.max_lost_text=0.13"
    )
    assert str(LostText(0)) == "0.00% (0 of 0 bytes)"


def test_parts_are_added() -> None:
    parts = [LostText(5), LostText(7, 2, "a"), LostText(8, 1, "b")]
    assert merge_lost_text(parts) == LostText(20, 3, "a")
    assert sample_texts("ab" * 4096 for _ in range(20)) == ["ab" * 2048] * 16


@pytest.fixture
def split_tokenizer(tmp_path: Path) -> Path:
    """Write the embedded tokenizer without its pre-tokenizer, which loses spaces."""
    settings = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8")) | {"pre_tokenizer": None}
    path = tmp_path / "split.json"
    path.write_text(json.dumps(settings))
    return path


def test_runs_refuse_a_tokenizer_that_loses_heldout_text(
    corpora, open_loader, split_tokenizer: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        open_loader(corpora.data(tokenizer=str(split_tokenizer)))
    for name, problem in zip(("alpha", "beta", "gamma"), error.value.problems, strict=True):
        assert problem.startswith(f"data.tokenizer={split_tokenizer} loses ")
        limit = "more than data.max_lost_text=0.01; use a tokenizer"
        assert f") of the held-out text of data.sources.{name}, {limit}" in problem
    loader = open_loader(corpora.data(tokenizer=str(split_tokenizer), max_lost_text=1.0))
    notes = loader.lost_text_notes()
    assert len(notes) == 3
    assert notes[0].startswith(f"data.tokenizer={split_tokenizer} loses ")
    assert notes[0].endswith(") of the held-out text of alpha")
    assert not open_loader(corpora.data()).lost_text_notes()


def test_a_tokenizer_that_encodes_none_of_the_test_texts_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"?": 0, "the": 1}, unk_token="?"))
    tokenizer.add_special_tokens(["</s>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    with pytest.raises(ConfigError, match=r"loses 100\.00% .* of the test texts, more than"):
        Tokenizer(str(path), ".", "</s>")
    assert Tokenizer(str(path), ".", "</s>", max_lost_text=1.0).vocab_size == 3
