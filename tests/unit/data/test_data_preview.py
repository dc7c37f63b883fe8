"""Test that a preview shows the training text and its document boundaries."""

import pytest

from hlat.config.batch import BatchConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data.data_preview import render_preview


def test_sequences_are_printed_with_document_boundaries(corpora, open_loader, eos) -> None:
    corpora.write("alpha", [f"document {i}" for i in range(40)])
    data = corpora.data({"alpha": 1.0}, preview=5, workers=2)
    phase, batch = PhaseConfig("p", [PhaseStage("s")]), BatchConfig(4, 1, 32)
    shown = "\n".join(render_preview(data, phase, batch, 1))
    loader = open_loader(corpora.data({"alpha": 1.0}), phase, batch)
    rows = [*loader.next_batch().tokens, loader.next_batch().tokens[0]]
    blocks = shown.split("== sequence ")[1:]
    assert len(blocks) == 5
    for number, (block, row) in enumerate(zip(blocks, rows, strict=True), 1):
        title, *lines = block.splitlines()
        texts = loader._training_data.tokenizer.decode(row).split(eos)
        assert title.startswith(f"{number}: 32 tokens, {len(list(filter(None, texts)))} documents")
        assert [line for line in lines if line.startswith("document")] == [
            text for text in texts if text.startswith("document")
        ]
        assert sum(line.startswith(f"-- {eos} -") for line in lines) == len(texts) - 1
    assert shown.endswith("tokens of each source in the batches of these rows: alpha 256")


def test_bos_is_printed_at_the_start_of_its_document(corpora, bos_tokenizer_file, bos, eos) -> None:
    corpora.write("alpha", [f"document {i}" for i in range(40)])
    changes = {"tokenizer": str(bos_tokenizer_file), "bos_token": bos, "preview": 4}
    data = corpora.data({"alpha": 1.0}, **changes)
    phase, batch = PhaseConfig("p", [PhaseStage("s")]), BatchConfig(4, 1, 32)
    lines = "\n".join(render_preview(data, phase, batch, 1)).splitlines()
    titles = [i for i, line in enumerate(lines) if line.startswith("==")]
    assert len(titles) == 4
    assert all(lines[i + 1].startswith(f"{bos}document ") for i in titles)
    assert sum(line.startswith(bos) for line in lines) > 8
    assert f"-- {eos} ".ljust(80, "-") in lines


@pytest.mark.slow
def test_preview_does_not_start_training(hlat, small, tmp_path) -> None:
    done = hlat("train", *small, "data.preview=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("== sequence 1: 64 tokens, ")
    assert not (tmp_path / "runs").exists()
