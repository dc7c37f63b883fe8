"""Test that the comparison finds every difference between two encoders."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from hlat.config.config_errors import ConfigError
from hlat.config.data import EncoderLibrary
from hlat.data import encoder_parity, encoder_test_texts
from hlat.data.encoder_parity import EncoderParity, EncoderTestInputs, compare_encoders
from hlat.data.token_encoders import FastEncoder, FastEncoderWithFallback, ReferenceEncoder
from hlat.data.tokenizer import EMBEDDED_FILE, Tokenizer
from hlat.data.train_tokenizer import SPLIT_PATTERN

EOS = "<|end|>"
CODE_POINTS = [
    *range(0x600),
    *range(0x880, 0x8D0),
    *range(0x2000, 0x2070),
    *range(0x1F5F0, 0x1F610),
]
QWEN = SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _few_probes(written) -> EncoderTestInputs:
    texts = [
        *encoder_test_texts.generate_token_spellings(written),
        *encoder_test_texts.generate_texts(5),
    ]
    return EncoderTestInputs(texts, CODE_POINTS, [*encoder_test_texts.generate_compositions()][::7])


@pytest.fixture
def outcomes(monkeypatch, tmp_path: Path) -> Path:
    """Use an empty cache and replace the comparison by a stub."""
    monkeypatch.setattr(
        encoder_parity, "build_test_inputs", lambda written: EncoderTestInputs(list(written))
    )
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parity"


@pytest.fixture
def few(monkeypatch, outcomes: Path) -> None:
    """Reduce the inputs of the comparison."""
    monkeypatch.setattr(encoder_parity, "build_test_inputs", _few_probes)


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
    """Build a fast encoder that differs from the reference for selected inputs."""

    class Planted(FastEncoder):
        def __init__(self, differs: Callable[[str], bool], ids: list[int]) -> None:
            self.differs = differs
            self.ids = np.array(ids, np.int32)

        def encode_one(self, text):
            text = text if isinstance(text, str) else text.decode()
            return self.ids if self.differs(text) else reference.encode([text])[0]

    return lambda differs, ids=(7, 8, 9): Planted(differs, list(ids))


@pytest.mark.parametrize("family", [_gpt2, _llama3, _qwen, _metaspace, _llama2])
def test_families_of_tokenizers_pass(family, texts, few, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(family(texts)))
    reference, fast = (
        Tokenizer("tokenizer.json", str(tmp_path), EOS, encoder) for encoder in EncoderLibrary
    )
    assert [ids.tolist() for ids in fast.encode(texts)] == [
        ids.tolist() for ids in reference.encode(texts)
    ]
    assert max(map(len, fast.encode(texts))) > 200


def test_what_the_fast_library_overlooks_is_found(texts, few, tmp_path) -> None:
    """The library splits by GPT-2's pattern even if the file has none."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (tmp_path / "unsplit.json").write_text(json.dumps(_train_bytes(texts, byte_level)))
    with pytest.raises(ConfigError) as error:
        Tokenizer("unsplit.json", str(tmp_path), EOS, EncoderLibrary.fast)
    message = str(error.value)
    assert "does not give the ids of the reference for data.tokenizer=unsplit.json" in message
    assert message.endswith("; set data.encoder=reference")


def test_code_points_that_differ_are_listed_and_left_to_the_reference(plant, reference) -> None:
    fast = plant(lambda text: not {"λ", "μ", "\u2028"}.isdisjoint(text))
    found = compare_encoders(fast, reference, _few_probes([]), "x")
    assert found == EncoderParity(((0x3BB, 0x3BC), (0x2028, 0x2028)), "")
    exact = FastEncoderWithFallback(fast, reference, found.unlike)
    for text in ("λ and ж", "x\u2028y", "ж"):
        assert exact.encode([text])[0].tolist() == reference.encode([text])[0].tolist()


def test_a_composition_that_differs_lists_its_rarest_part(plant, reference) -> None:
    parts = "\u0438\u0306"
    fast = plant(lambda text: parts in text)
    found = compare_encoders(
        fast, reference, EncoderTestInputs([f"a{parts}b"], [], ["ao\u0308", f"a{parts}"]), "x"
    )
    assert found == EncoderParity(((0x438, 0x438),), "")


def test_a_document_that_differs_is_shown_by_its_smallest_part(plant, reference) -> None:
    fast = plant(lambda text: "needle" in text)
    found = compare_encoders(
        fast, reference, EncoderTestInputs(["fine", "hay " * 500 + "needle" + " hay" * 500]), "x"
    )
    ids = reference.encode(["needle"])[0].tolist()
    assert "needle" in found.difference
    assert len(found.difference) < 300
    assert "as [7, 8, 9] instead of [" in found.difference
    assert all(str(number) in found.difference for number in ids[:1])


def test_a_difference_that_no_single_code_point_shows_is_found(plant, reference) -> None:
    fast = plant(lambda text: "\u0186" in text and "\u0189" in text)
    difference = compare_encoders(
        fast, reference, EncoderTestInputs([], CODE_POINTS), "x"
    ).difference
    assert "\u0186" in difference
    assert "\u0189" in difference
    assert difference.endswith("(from token 0 on)")
    assert len(difference) < 200


def test_control_tokens_that_become_ids_are_found(plant, reference, eos) -> None:
    fast = plant(lambda text: eos in text, ids=[0])
    assert (
        "as [0] instead of" in compare_encoders(fast, reference, _few_probes([eos]), "x").difference
    )


def test_a_letter_that_differs_refuses_at_once(plant, reference) -> None:
    found = compare_encoders(
        plant(lambda text: "Q" in text), reference, EncoderTestInputs([], CODE_POINTS), "x"
    )
    assert found.unlike == ()
    assert "Q" in found.difference


def test_too_many_code_points_are_not_left_to_the_reference(plant, reference, monkeypatch) -> None:
    monkeypatch.setattr(encoder_parity, "MAX_DIFFERING_CODE_POINTS", 2)
    fast = plant(lambda text: not set("λμж").isdisjoint(text))
    found = compare_encoders(fast, reference, EncoderTestInputs([], CODE_POINTS), "x")
    assert found.difference == "it reads 3 code points differently"


def test_the_comparison_is_made_once(outcomes, eos, monkeypatch, capsys) -> None:
    Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
    assert "comparing the fast encoder with the reference" in capsys.readouterr().err
    assert [file.suffix for file in outcomes.iterdir()] == [".json"]
    with monkeypatch.context() as patch:
        patch.setattr(encoder_parity, "compare_encoders", None)
        Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
    monkeypatch.setattr(encoder_parity, "COMPARISON_VERSION", encoder_parity.COMPARISON_VERSION + 1)
    Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
    assert len(list(outcomes.iterdir())) == 2
    assert "comparing" in capsys.readouterr().err


def test_a_refusal_is_remembered_too(outcomes, eos, monkeypatch) -> None:
    monkeypatch.setattr(
        encoder_parity, "compare_encoders", lambda *_: EncoderParity((), "it stutters")
    )
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
        assert str(error.value) == (
            "data.encoder=fast does not give the ids of the reference for "
            "data.tokenizer=embedded: it stutters; set data.encoder=reference"
        )
        monkeypatch.setattr(encoder_parity, "compare_encoders", None)


@pytest.mark.parametrize("damage", ["", "{}", '{"unlike": [3], "difference": ""}', "\x00"])
def test_a_damaged_outcome_is_made_again(outcomes, eos, damage, capsys) -> None:
    Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
    (file,) = outcomes.iterdir()
    whole = file.read_text()
    file.write_text(damage)
    capsys.readouterr()
    Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
    assert "comparing" in capsys.readouterr().err
    assert file.read_text() == whole


def test_without_a_cache_every_run_compares(outcomes, eos, monkeypatch, tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
        assert "comparing" in capsys.readouterr().err


def test_probes_hold_every_code_point_and_thousands_of_texts(embedded_folder, eos) -> None:
    found = encoder_parity.build_test_inputs([eos])
    assert len(set(found.code_points)) == 1_112_064
    assert len(found.texts) > 5000
    assert list(encoder_test_texts.generate_texts(3)) == list(encoder_test_texts.generate_texts(3))
    assert sum(eos in text for text in found.texts) >= 8
    assert len(found.compositions) > 13_000


def test_probes_do_without_the_corpus_where_it_cannot_be_prepared(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HLAT_CACHE", str(tmp_path / "file"))
    assert list(encoder_test_texts.read_embedded_texts()) == []


@pytest.mark.slow
def test_the_shipped_tokenizer_passes_in_full(embedded_folder, eos) -> None:
    fast = Tokenizer("embedded", ".", eos, EncoderLibrary.fast)
    reference = Tokenizer("embedded", ".", eos)
    texts = list(encoder_test_texts.generate_texts(40))
    assert [ids.tolist() for ids in fast.encode(texts)] == [
        ids.tolist() for ids in reference.encode(texts)
    ]
