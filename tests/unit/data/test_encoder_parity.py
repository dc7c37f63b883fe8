"""Test that the fast encoder gives the ids of the reference, and that a difference is refused."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from hlat.config.config_errors import ConfigError
from hlat.config.data import EncoderLibrary
from hlat.data import token_encoders
from hlat.data import tokenizer as tokenizer_module
from hlat.data.encoder_parity import TEXTS, validate_same_ids
from hlat.data.token_encoders import FastEncoder, ReferenceEncoder, TokenEncoder
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer
from hlat.data.train_tokenizer import SPLIT_PATTERN
from tests.support import encoder_test_texts

EOS = "<|end|>"
CODE_POINTS = [
    *range(0x600),
    *range(0x880, 0x8D0),
    *range(0x2000, 0x2070),
    *range(0x1F5F0, 0x1F610),
]
QWEN = SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    lines = (Path(__file__).parents[2] / "data" / "corpus.jsonl").read_text().splitlines()
    return [json.loads(line)["text"][:2000] for line in lines] + list(
        encoder_test_texts.generate_texts(3)
    )


def _train_bytes(texts: list[str], pre_tokenizer, normalizer=None) -> dict:
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizer
    if normalizer:
        rust.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(texts, trainer)
    return json.loads(rust.to_str())


def _split(pattern: str):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _gpt2(texts: list[str]) -> dict:
    return _train_bytes(texts, pre_tokenizers.ByteLevel(add_prefix_space=False))


def _llama3(texts: list[str]) -> dict:
    settings = _train_bytes(texts, _split(SPLIT_PATTERN))
    settings["model"]["ignore_merges"] = True
    return settings


def _qwen(texts: list[str]) -> dict:
    return _train_bytes(texts, _split(QWEN), normalizers.NFC())


def _metaspace(texts: list[str]) -> dict:
    """Build a converted SentencePiece model with byte fallback."""
    rust = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=700, limit_alphabet=90, special_tokens=["<unk>", EOS], show_progress=False
    )
    rust.train_from_iterator(texts, trainer)
    settings = json.loads(rust.to_str())
    vocab = settings["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    return settings


def _llama2(texts: list[str]) -> dict:
    """Build a converted Llama 2 model with merges across spaces."""
    settings = _metaspace(texts)
    settings["pre_tokenizer"] = None
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    settings["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    return settings


@pytest.fixture
def reference() -> ReferenceEncoder:
    rust = tokenizers.Tokenizer.from_file(str(EMBEDDED_FILE))
    rust.encode_special_tokens = True
    return ReferenceEncoder(rust)


@pytest.fixture
def plant(reference) -> Iterator[Callable]:
    """Build an encoder that differs from the reference for selected inputs."""

    class Planted:
        def __init__(self, differs: Callable[[str], bool], ids: Sequence[int] = (7, 8, 9)) -> None:
            self.differs = differs
            self.ids = np.array(ids, np.int32)

        def encode(self, texts):
            return [
                self.ids if self.differs(text) else reference.encode([text])[0] for text in texts
            ]

    return Planted


def _encode_both(encoders: tuple[TokenEncoder, TokenEncoder], texts: Sequence[str]) -> list[str]:
    """Return the texts for which the encoders return different ids."""
    fast, reference = encoders
    pairs = zip(texts, fast.encode(texts), reference.encode(texts), strict=True)
    return [text for text, ids, expected in pairs if not np.array_equal(ids, expected)]


def _open_encoders(settings: dict, directory: Path) -> tuple[Tokenizer, Tokenizer]:
    (directory / "tokenizer.json").write_text(json.dumps(settings))
    reference, fast = (
        Tokenizer("tokenizer.json", str(directory), EOS, encoder) for encoder in EncoderLibrary
    )
    return fast, reference


FAMILIES = [_gpt2, _llama3, _qwen, _metaspace, _llama2]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_tokenizers_pass(family, texts, tmp_path) -> None:
    encoders = _open_encoders(family(texts), tmp_path)
    assert max(map(len, encoders[0].encode(texts))) > 200
    wrapped = [encoder_test_texts.wrap_code_point(point) for point in CODE_POINTS]
    spelled = encoder_test_texts.generate_token_spellings([EOS])
    generated = encoder_test_texts.generate_texts(5)
    compositions = itertools.islice(encoder_test_texts.generate_compositions(), 0, None, 7)
    for inputs in (texts, wrapped, [*spelled], [*generated], [*compositions]):
        assert _encode_both(encoders, inputs) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_on_all_code_points_and_thousands_of_texts(
    family, texts, embedded_folder, tmp_path
) -> None:
    encoders = _open_encoders(family(texts), tmp_path)
    # The reference encodes the others; a difference in one changes the ids of its group
    differing = token_encoders._find_differing_code_points()
    all_code_points = itertools.chain(*encoder_test_texts.CODE_POINTS)
    code_points = [point for point in all_code_points if not differing[point]]
    assert len(code_points) > 140_000
    groups = [code_points[start : start + 64] for start in range(0, len(code_points), 64)]
    wrap = encoder_test_texts.wrap_code_point
    for group in groups:
        assert _encode_both(encoders, ["".join(map(wrap, group))]) == []
    compositions = [*encoder_test_texts.generate_compositions()]
    assert len(compositions) > 13_000
    assert _encode_both(encoders, compositions) == []
    generated = [*encoder_test_texts.generate_texts()]
    assert len(generated) == 4000
    assert _encode_both(encoders, generated) == []
    assert _encode_both(encoders, [*encoder_test_texts.read_embedded_texts()]) == []


@pytest.mark.slow
def test_the_shipped_tokenizer_passes_in_full(embedded_folder, eos) -> None:
    encoders = Tokenizer("embedded", ".", eos, EncoderLibrary.fast), Tokenizer("embedded", ".", eos)
    assert _encode_both(encoders, list(encoder_test_texts.generate_texts(40))) == []
    assert _encode_both(encoders, list(encoder_test_texts.read_embedded_texts())) == []


def test_what_the_fast_library_overlooks_is_found(texts, tmp_path) -> None:
    """The library splits by GPT-2's pattern even if the file has none."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (tmp_path / "unsplit.json").write_text(json.dumps(_train_bytes(texts, byte_level)))
    with pytest.raises(ConfigError) as error:
        Tokenizer("unsplit.json", str(tmp_path), EOS, EncoderLibrary.fast)
    message = str(error.value)
    assert "does not give the ids of the reference for data.tokenizer=unsplit.json" in message
    assert message.endswith("; set data.encoder=reference")


def test_a_document_that_differs_is_shown_by_its_smallest_part(plant, reference) -> None:
    fast = plant(lambda text: "needle" in text)
    with pytest.raises(ConfigError) as error:
        validate_same_ids("x", fast, reference, ["fine", "hay " * 500 + "needle" + " hay" * 500])
    ids = reference.encode(["needle"])[0].tolist()
    difference = str(error.value)
    assert "needle" in difference
    assert len(difference) < 400
    assert "as [7, 8, 9] instead of [" in difference
    assert all(str(number) in difference for number in ids[:1])
    assert difference.endswith("(from token 0 on); set data.encoder=reference")


def test_control_tokens_that_become_ids_are_found(plant, reference, eos, monkeypatch) -> None:
    fast = plant(lambda text: eos in text, ids=[0])
    monkeypatch.setattr(tokenizer_module, "FastEncoder", lambda *_: fast)
    with pytest.raises(ConfigError, match=r"as \[0\] instead of"):
        Tokenizer("embedded", ".", eos, EncoderLibrary.fast)


def test_documents_of_every_source_are_compared(
    plant, corpora, open_loader, eos, monkeypatch
) -> None:
    corpora.write("alpha", ["words"] * 30)
    corpora.write("beta", ["words with a needle"] * 30)
    fast = plant(lambda text: "needle" in text)
    monkeypatch.setattr(tokenizer_module, "FastEncoder", lambda *_: fast)
    monkeypatch.setattr("hlat.data.training_data.Tokenizer", Tokenizer)
    open_loader(corpora.data({"alpha": 1.0}, encoder=EncoderLibrary.fast))
    with pytest.raises(ConfigError, match=r"it encodes 'needle' as \[7, 8, 9\] instead of"):
        open_loader(corpora.data({"alpha": 1.0, "beta": 1.0}, encoder=EncoderLibrary.fast))


def test_compared_texts_are_read_by_the_fast_library(reference) -> None:
    """A text that falls back to the reference compares the reference with itself."""

    class NoReference:
        def encode(self, texts):
            pytest.fail(texts[0])

    fast = FastEncoder("embedded", EMBEDDED_FILE.read_bytes(), NoReference())
    assert _encode_both((fast, reference), TEXTS) == []


def test_generated_texts_are_deterministic_and_spell_tokens(eos) -> None:
    assert list(encoder_test_texts.generate_texts(3)) == list(encoder_test_texts.generate_texts(3))
    spelled = encoder_test_texts.generate_token_spellings([eos])
    assert sum(eos in text for text in spelled) >= 8
