"""Test the seed-independent held-out split and the epochs of the rest."""

import shutil

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.data import SourceConfig as SourceConfig
from hlat.data.data_source import open_data_sources


def test_heldout_documents_never_enter_training(corpora) -> None:
    for seed in (1, 2):
        for name, source in open_data_sources(corpora.data(), seed).items():
            heldout = set(source.read_heldout_documents())
            epochs = range(3 * source.num_training_documents)
            assert len(heldout) == 3
            assert heldout.isdisjoint(
                str(source.read_training_document(p), "utf-8") for p in epochs
            )
            assert heldout | {
                str(source.read_training_document(p), "utf-8") for p in epochs
            } == set(corpora.texts[name])


def test_the_split_does_not_depend_on_the_seed_or_other_sources(corpora) -> None:
    first = open_data_sources(corpora.data(), 1)["beta"]
    second = open_data_sources(corpora.data({"beta": 1.0}), 2)["beta"]
    assert list(first.read_heldout_documents()) == list(second.read_heldout_documents())


def test_every_epoch_is_another_order_of_all_training_rows(corpora) -> None:
    for source in open_data_sources(corpora.data(), 1).values():
        n = source.num_training_documents
        epochs = [tuple(source.get_training_row(e * n + i) for i in range(n)) for e in range(4)]
        assert len(set(epochs)) == 4
        assert len({frozenset(epoch) for epoch in epochs}) == 1
        assert all(len(set(epoch)) == n for epoch in epochs)


def test_seed_and_name_key_the_order(corpora) -> None:
    corpora.write("copy", corpora.texts["alpha"])
    weights = {"alpha": 1.0, "copy": 1.0}
    one, two = (
        open_data_sources(corpora.data(weights), 1),
        open_data_sources(corpora.data(weights), 2),
    )
    orders = [
        [str(s.read_training_document(p), "utf-8") for p in range(37)]
        for s in (*one.values(), two["alpha"])
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_the_content_keys_the_order_and_the_split(corpora) -> None:
    before = open_data_sources(corpora.data(), 1)["alpha"]
    rows = [before.get_training_row(position) for position in range(before.num_training_documents)]
    assert corpora.texts["alpha"][0] is not None
    corpora.write("alpha", [corpora.texts["alpha"][0].upper(), *corpora.texts["alpha"][1:]])
    after = open_data_sources(corpora.data(), 1)["alpha"]
    assert rows != [
        after.get_training_row(position) for position in range(after.num_training_documents)
    ]
    assert set(rows) != {
        after.get_training_row(position) for position in range(after.num_training_documents)
    }


def test_neither_place_nor_neighbours_of_a_source_key_its_order(corpora, tmp_path) -> None:
    alone = corpora.data({"beta": 1.0}, root=str(shutil.copytree(tmp_path, tmp_path / "moved")))
    sources = [open_data_sources(data, 1)["beta"] for data in (corpora.data(), alone)]
    orders = [[s.get_training_row(position) for position in range(70)] for s in sources]
    assert orders[0] == orders[1]


def test_a_document_is_its_bytes_at_any_position(corpora) -> None:
    source = open_data_sources(corpora.data(), 1)["gamma"]
    size = source.num_training_documents
    for position in (0, 3 * size, size - 1, size, 7, 2 * size + 1, 3 * size):  # epochs in any order
        document = source.read_training_document(position)
        assert document == source.dataset.read_document(source.get_training_row(position))


def test_a_source_may_name_its_own_column(corpora, write_arrow, make_texts) -> None:
    texts = make_texts("body", 30)
    path = write_arrow(corpora.root / "own" / "a.arrow", texts, column="body")
    data = corpora.data({"alpha": 1.0, "own": 1.0})
    with pytest.raises(ConfigError) as error:
        open_data_sources(data, 1)
    assert str(error.value) == (
        f"data.text_column=text: {path} has no column of this name; it has number (int64), body "
        "(string); set it, or text_column of this source alone, to one of: body"
    )
    data.sources["own"].text_column = "body"
    sources = open_data_sources(data, 1)
    assert str(sources["own"].read_training_document(0), "utf-8") in texts
    assert str(sources["alpha"].read_training_document(0), "utf-8") in corpora.texts["alpha"]
    data.sources["own"].text_column = "title"
    with pytest.raises(
        ConfigError, match=r"data\.sources\.own\.text_column=title: .*; set it to one"
    ):
        open_data_sources(data, 1)


def test_too_few_documents_is_an_error(corpora) -> None:
    with pytest.raises(ConfigError) as error:
        open_data_sources(corpora.data(heldout_documents=12), 1)
    assert str(error.value) == (
        "data.sources.beta has 23 documents, of which data.heldout_documents=12 are held out; more "
        "than twice as many are needed: set data.heldout_documents to 11 or less, or give the "
        "source more files"
    )


def test_only_empty_documents_is_an_error(corpora) -> None:
    corpora.write("void", ["", None] * 10)
    data = corpora.data({"void": 1.0})
    with pytest.raises(ConfigError, match=r"data\.sources\.void: every training document is empty"):
        open_data_sources(data, 1)


def test_the_problems_of_all_sources_are_reported_at_once(corpora) -> None:
    data = corpora.data()
    data.sources["alpha"] = SourceConfig(["nowhere"])
    data.sources["beta"] = SourceConfig(["embedded:poems"])
    with pytest.raises(ConfigError) as error:
        open_data_sources(data, 1)
    assert [p.split(":")[0] for p in error.value.problems] == [
        "data.sources.alpha.paths",
        "data.sources.beta.paths",
    ]


def test_a_file_of_two_sources_is_refused(corpora) -> None:
    data = corpora.data()
    data.sources["beta"] = data.sources["alpha"]
    with pytest.raises(ConfigError, match=r"data\.sources\.beta\.paths: .* also belongs to"):
        open_data_sources(data, 1)


def test_readers_of_any_stride_find_the_same_document_at_a_position(corpora) -> None:
    source = open_data_sources(corpora.data(), 1)["gamma"]
    rows = [source.get_training_row(position) for position in range(400)]
    for stride in (1, 4, 3, 64, 200):
        for position in [*range(0, 400, stride), *range(1, 400, stride), 7, 399, 8, 0]:
            found = source.read_training_document(position, stride)
            assert found == source.dataset.read_document(rows[position])
