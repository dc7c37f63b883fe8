"""Test the command that trains the embedded tokenizer."""

from pathlib import Path

import pytest

from hlat.data.data_source import open_data_sources
from hlat.data.tokenizer import Tokenizer
from hlat.prepare import embedded_tokenizer as train_tokenizer


@pytest.mark.xdist_group("embedded")
@pytest.mark.usefixtures("embedded_folder")
@pytest.mark.slow
def test_a_small_vocabulary_is_trained_and_reported(tmp_path: Path, monkeypatch, capsys, eos):
    def few(sources):
        return (
            str(source.read_training_document(i), "utf-8") for source in sources for i in range(20)
        )

    monkeypatch.setattr(train_tokenizer, "read_balanced_documents", few)
    outputs = [tmp_path / "1.json", tmp_path / "2.json"]
    for output in outputs:
        arguments = ["--vocab-size", "500", "--output", str(output)]
        assert train_tokenizer.main(arguments) == 0
    assert "prose: " in capsys.readouterr().out
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    tokenizer = Tokenizer("1.json", str(tmp_path), eos)
    assert tokenizer.vocab_size == 500
    (ids,) = tokenizer.encode(["\x00 été 木 😀"])
    assert tokenizer.decode(ids.tolist()) == f"\x00 été 木 😀{eos}"


def test_sources_are_balanced_without_heldout_documents(corpora) -> None:
    sources = open_data_sources(corpora.data(), 0)
    texts = list(train_tokenizer.read_balanced_documents(list(sources.values())))
    assert len(set(texts)) == len(texts) == 3 * 20
    for source in sources.values():
        assert set(source.read_heldout_documents()).isdisjoint(texts)
