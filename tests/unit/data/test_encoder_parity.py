"""Test that the fast encoder returns the ids of the reference, and that differences are errors."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from hlat.config.config_errors import ConfigError
from hlat.config.data import EncoderLibrary
from hlat.data import token_encoders
from hlat.data import tokenizer as tokenizer_module
from hlat.data.encoder_parity import TEXTS, validate_same_ids
from hlat.data.token_encoders import FastEncoder, ReferenceEncoder, TokenEncoder
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer
from hlat.prepare.embedded_tokenizer import SPLIT_PATTERN
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
def documents() -> list[str]:
    lines = (Path(__file__).parents[2] / "data" / "corpus.jsonl").read_text().splitlines()
    return [json.loads(line)["text"][:2000] for line in lines] + list(
        encoder_test_texts.generate_texts(3)
    )


def _train_bytes(documents: list[str], pre_tokenizer, normalizer=None) -> dict:
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizer
    if normalizer:
        rust.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(documents, trainer)
    return json.loads(rust.to_str())


def _split(pattern: str):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _gpt2(documents: list[str]) -> dict:
    return _train_bytes(documents, pre_tokenizers.ByteLevel(add_prefix_space=False))


def _llama3(documents: list[str]) -> dict:
    settings = _train_bytes(documents, _split(SPLIT_PATTERN))
    settings["model"]["ignore_merges"] = True
    return settings


def _qwen(documents: list[str]) -> dict:
    return _train_bytes(documents, _split(QWEN), normalizers.NFC())


def _metaspace(documents: list[str]) -> dict:
    """Build a converted SentencePiece model with byte fallback."""
    rust = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, limit_alphabet=90, special_tokens=["<unk>", EOS], show_progress=False
    )
    rust.train_from_iterator(documents, trainer)
    settings = json.loads(rust.to_str())
    vocab = settings["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    return settings


def _llama2(documents: list[str]) -> dict:
    """Build a converted Llama 2 model with merges across spaces."""
    settings = _metaspace(documents)
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
def build_differing_encoder(reference) -> Iterator[Callable]:
    """Build an encoder that differs from the reference for selected inputs."""

    class DifferingEncoder:
        def __init__(self, differs: Callable[[str], bool], ids: Sequence[int] = (7, 8, 9)) -> None:
            self.differs = differs
            self.ids = np.array(ids, np.int32)

        def encode(self, documents):
            return [
                self.ids if self.differs(text) else reference.encode([text])[0]
                for text in documents
            ]

    return DifferingEncoder


def _find_differences(
    encoders: tuple[TokenEncoder, TokenEncoder], inputs: Sequence[str]
) -> list[str]:
    """Return the inputs for which the encoders return different ids."""
    fast, reference = encoders
    pairs = zip(inputs, fast.encode(inputs), reference.encode(inputs), strict=True)
    return [text for text, ids, expected in pairs if not np.array_equal(ids, expected)]


def _open_encoders(settings: dict, directory: Path) -> tuple[Tokenizer, Tokenizer]:
    (directory / "tokenizer.json").write_text(json.dumps(settings))
    reference, fast = (
        Tokenizer("tokenizer.json", str(directory), EOS, encoder) for encoder in EncoderLibrary
    )
    return fast, reference


FAMILIES = [_gpt2, _llama3, _qwen, _metaspace, _llama2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow_after(2)
def test_families_of_tokenizers_pass(family, documents, tmp_path) -> None:
    encoders = _open_encoders(family(documents), tmp_path)
    assert max(map(len, encoders[0].encode(documents))) > 200
    wrapped = [encoder_test_texts.wrap_code_point(point) for point in CODE_POINTS]
    spelled = encoder_test_texts.generate_token_spellings([EOS])
    generated = encoder_test_texts.generate_texts(5)
    compositions = itertools.islice(encoder_test_texts.generate_compositions(), 0, None, 7)
    for inputs in (documents, wrapped, [*spelled], [*generated], [*compositions]):
        assert _find_differences(encoders, inputs) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_on_all_code_points_and_generated_inputs(
    family, documents, embedded_folder, tmp_path
) -> None:
    encoders = _open_encoders(family(documents), tmp_path)
    # The reference encodes the other code points; a difference in one changes the ids of its group
    differing = token_encoders._find_differing_code_points()
    all_code_points = itertools.chain(*encoder_test_texts.CODE_POINTS)
    code_points = [point for point in all_code_points if not differing[point]]
    assert len(code_points) > 140_000
    groups = [code_points[start : start + 64] for start in range(0, len(code_points), 64)]
    wrap = encoder_test_texts.wrap_code_point
    for group in groups:
        assert _find_differences(encoders, ["".join(map(wrap, group))]) == []
    compositions = [*encoder_test_texts.generate_compositions()]
    assert len(compositions) > 13_000
    assert _find_differences(encoders, compositions) == []
    generated = [*encoder_test_texts.generate_texts()]
    assert len(generated) == 4000
    assert _find_differences(encoders, generated) == []
    assert _find_differences(encoders, [*encoder_test_texts.read_embedded_texts()]) == []


@pytest.mark.slow
def test_the_shipped_tokenizer_passes_in_full(embedded_folder, eos) -> None:
    encoders = Tokenizer("embedded", ".", eos, EncoderLibrary.fast), Tokenizer("embedded", ".", eos)
    assert _find_differences(encoders, list(encoder_test_texts.generate_texts(40))) == []
    assert _find_differences(encoders, list(encoder_test_texts.read_embedded_texts())) == []


def test_missing_pre_tokenizer_pattern_is_detected(documents, tmp_path) -> None:
    """Fast encoding splits by GPT-2's pattern even if the file has none."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (tmp_path / "unsplit.json").write_text(json.dumps(_train_bytes(documents, byte_level)))
    with pytest.raises(ConfigError) as error:
        Tokenizer("unsplit.json", str(tmp_path), EOS, EncoderLibrary.fast)
    message = str(error.value)
    assert "does not give the ids of the reference for data.tokenizer=unsplit.json" in message
    assert message.endswith("; set data.encoder=reference")


def test_error_contains_the_smallest_differing_string(build_differing_encoder, reference) -> None:
    fast = build_differing_encoder(lambda text: "needle" in text)
    with pytest.raises(ConfigError) as error:
        validate_same_ids("x", fast, reference, ["fine", "hay " * 500 + "needle" + " hay" * 500])
    ids = reference.encode(["needle"])[0].tolist()
    difference = str(error.value)
    assert "needle" in difference
    assert len(difference) < 400
    assert "as [7, 8, 9] instead of [" in difference
    assert all(str(number) in difference for number in ids[:1])
    assert difference.endswith("(from token 0 on); set data.encoder=reference")


def test_encoded_control_tokens_are_detected(
    build_differing_encoder, reference, eos, monkeypatch
) -> None:
    fast = build_differing_encoder(lambda text: eos in text, ids=[0])
    monkeypatch.setattr(tokenizer_module, "FastEncoder", lambda *_: fast)
    with pytest.raises(ConfigError, match=r"as \[0\] instead of"):
        Tokenizer("embedded", ".", eos, EncoderLibrary.fast)


def test_documents_of_every_source_are_compared(
    build_differing_encoder, corpora, open_loader, eos, monkeypatch
) -> None:
    corpora.write("alpha", ["words"] * 30)
    corpora.write("beta", ["words with a needle"] * 30)
    fast = build_differing_encoder(lambda text: "needle" in text)
    monkeypatch.setattr(tokenizer_module, "FastEncoder", lambda *_: fast)
    monkeypatch.setattr("hlat.data.training_data.Tokenizer", Tokenizer)
    open_loader(corpora.data({"alpha": 1.0}, encoder=EncoderLibrary.fast))
    with pytest.raises(ConfigError, match=r"it encodes 'needle' as \[7, 8, 9\] instead of"):
        open_loader(corpora.data({"alpha": 1.0, "beta": 1.0}, encoder=EncoderLibrary.fast))


def test_compared_inputs_are_encoded_by_the_fast_library(reference) -> None:
    """Fail if an input falls back to the reference, which would be compared with itself."""

    class NoReference:
        def encode(self, documents):
            pytest.fail(documents[0])

    fast = FastEncoder("embedded", EMBEDDED_FILE.read_bytes(), NoReference())
    assert _find_differences((fast, reference), TEXTS) == []


def test_generated_inputs_are_deterministic_and_contain_tokens(eos) -> None:
    assert list(encoder_test_texts.generate_texts(3)) == list(encoder_test_texts.generate_texts(3))
    spelled = encoder_test_texts.generate_token_spellings([eos])
    assert sum(eos in text for text in spelled) >= 8
