"""Test the seed-independent held-out split and the epochs of the rest."""

import shutil

import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.data import SourceConfig as SourceConfig
from hlat.data import data_source
from hlat.data.data_source import open_data_sources


def test_heldout_documents_are_excluded_from_training(corpora) -> None:
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
            } == set(corpora.documents[name])


def test_separate_heldout_documents_are_the_only_ones(corpora) -> None:
    data = corpora.data({"alpha": 1.0}, heldout_documents=30)
    data.sources["alpha"].heldout_paths = ["beta"]
    source = open_data_sources(data, 1)["alpha"]
    assert source.num_training_documents == len(corpora.documents["alpha"])
    epoch = range(source.num_training_documents)
    trained = [str(source.read_training_document(position), "utf-8") for position in epoch]
    assert sorted(trained) == sorted(corpora.documents["alpha"])
    heldout = list(source.read_heldout_documents())
    assert len(heldout) == source.num_heldout_documents
    assert sorted(heldout) == sorted(corpora.documents["beta"])
    assert heldout != corpora.documents["beta"]  # a prefix is a sample
    assert heldout == list(open_data_sources(data, 2)["alpha"].read_heldout_documents())
    before = source.compute_fingerprint()
    corpora.write("beta", ["changed"])
    assert open_data_sources(data, 1)["alpha"].compute_fingerprint() != before
    data.sources["alpha"].heldout_paths = ["alpha/a.arrow"]
    with pytest.raises(ConfigError, match=r"heldout_paths: .* belongs to data.sources.alpha.paths"):
        open_data_sources(data, 1)


def test_split_is_independent_of_the_seed_and_other_sources(corpora) -> None:
    first = open_data_sources(corpora.data(), 1)["beta"]
    second = open_data_sources(corpora.data({"beta": 1.0}), 2)["beta"]
    assert list(first.read_heldout_documents()) == list(second.read_heldout_documents())


def test_every_epoch_is_another_permutation_of_all_training_rows(corpora) -> None:
    for source in open_data_sources(corpora.data(), 1).values():
        n = source.num_training_documents
        epochs = [tuple(source.get_training_row(e * n + i) for i in range(n)) for e in range(4)]
        assert len(set(epochs)) == 4
        assert len({frozenset(epoch) for epoch in epochs}) == 1
        assert all(len(set(epoch)) == n for epoch in epochs)


def test_order_depends_on_seed_and_name(corpora) -> None:
    corpora.write("copy", corpora.documents["alpha"])
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


def test_order_and_split_depend_on_the_content(corpora) -> None:
    before = open_data_sources(corpora.data(), 1)["alpha"]
    rows = [before.get_training_row(position) for position in range(before.num_training_documents)]
    assert corpora.documents["alpha"][0] is not None
    corpora.write("alpha", [corpora.documents["alpha"][0].upper(), *corpora.documents["alpha"][1:]])
    after = open_data_sources(corpora.data(), 1)["alpha"]
    assert rows != [
        after.get_training_row(position) for position in range(after.num_training_documents)
    ]
    assert set(rows) != {
        after.get_training_row(position) for position in range(after.num_training_documents)
    }


def test_order_is_independent_of_the_path_and_other_sources(corpora, tmp_path) -> None:
    moved = corpora.data({"beta": 1.0}, root=str(shutil.copytree(tmp_path, tmp_path / "moved")))
    sources = [open_data_sources(data, 1)["beta"] for data in (corpora.data(), moved)]
    orders = [[s.get_training_row(position) for position in range(70)] for s in sources]
    assert orders[0] == orders[1]


def test_documents_are_read_at_any_position(corpora) -> None:
    source = open_data_sources(corpora.data(), 1)["gamma"]
    size = source.num_training_documents
    for position in (0, 3 * size, size - 1, size, 7, 2 * size + 1, 3 * size):  # epochs in any order
        document = source.read_training_document(position)
        assert document == source.dataset.read_document(source.get_training_row(position))


def test_text_column_of_one_source(corpora, write_arrow, make_documents) -> None:
    documents = make_documents("body", 30)
    path = write_arrow(corpora.root / "own" / "a.arrow", documents, column="body")
    data = corpora.data({"alpha": 1.0, "own": 1.0})
    with pytest.raises(ConfigError) as error:
        open_data_sources(data, 1)
    assert str(error.value) == (
        f"data.text_column=text: {path} has no column of this name; it has number (int64), body "
        "(string); set it, or text_column of this source alone, to one of: body"
    )
    data.sources["own"].text_column = "body"
    sources = open_data_sources(data, 1)
    assert str(sources["own"].read_training_document(0), "utf-8") in documents
    assert str(sources["alpha"].read_training_document(0), "utf-8") in corpora.documents["alpha"]
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


def test_file_of_two_sources_is_rejected(corpora) -> None:
    data = corpora.data()
    data.sources["beta"] = data.sources["alpha"]
    with pytest.raises(ConfigError, match=r"data\.sources\.beta\.paths: .* also belongs to"):
        open_data_sources(data, 1)


@pytest.mark.parametrize("min_vectorized_rows", [8, 100])
def test_documents_are_independent_of_the_stride(
    corpora, monkeypatch: pytest.MonkeyPatch, min_vectorized_rows: int
) -> None:
    monkeypatch.setattr(data_source, "MIN_VECTORIZED_ROWS", min_vectorized_rows)
    source = open_data_sources(corpora.data(), 1)["gamma"]
    rows = [source.get_training_row(position) for position in range(400)]
    for stride in (1, 4, 3, 64, 200):
        for position in [*range(0, 400, stride), *range(1, 400, stride), 7, 399, 8, 0]:
            found = source.read_training_document(position, stride)
            assert found == source.dataset.read_document(rows[position])
