"""Directories as sources: weights, held-out text, overrides, and directories of strangers."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.sweep_axes import load_sweep_axes


def write(directory: Path, num_bytes: int, name: str = "part-00000.arrow") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(bytes(num_bytes))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write a corpus with a plain domain, one with separate held-out text, and one in Parquet."""
    write(tmp_path / "corpus/wiki", 300)
    write(tmp_path / "corpus/wiki", 45, "part-00001.arrow")
    write(tmp_path / "corpus/wiki", 999, "part-00000.arrow.rows.npy")
    write(tmp_path / "corpus/my-code/train", 100)
    write(tmp_path / "corpus/my-code/heldout", 7)
    write(tmp_path / "corpus/Web_2", 12, "a.parquet")
    (tmp_path / "corpus/.cache").mkdir()
    (tmp_path / "corpus/.DS_Store").write_text("")
    return tmp_path / "corpus"


def compose_data(*overrides: str):
    return compose_config([*overrides]).data


def test_directories_are_the_sources_with_their_bytes_as_weights(corpus):
    data = compose_data(f"data.domains={corpus}")
    assert (data.name, data.domains, data.heldout_domains) == ("corpus", None, None)
    assert {name: source.weight for name, source in data.sources.items()} == {
        "Web_2": 12,
        "my-code": 100,
        "wiki": 345,
    }
    assert data.sources.wiki.paths == [f"{corpus}/wiki"]
    assert data.sources.wiki.heldout_paths == []
    assert data.sources["my-code"].paths == [f"{corpus}/my-code/train"]
    assert data.sources["my-code"].heldout_paths == [f"{corpus}/my-code/heldout"]


def test_overrides_change_weights_and_remove_a_source(corpus):
    words = [f"data.domains={corpus}", "data.sources.wiki.weight=3", "~data.sources.Web_2"]
    data = compose_data(*words, "data.name=mine", "data.sources.my-code.text_column=body")
    assert {name: source.weight for name, source in data.sources.items()} == {
        "my-code": 100,
        "wiki": 3,
    }
    assert (data.name, data.sources["my-code"].text_column) == ("mine", "body")


def test_paths_are_relative_to_the_root(corpus):
    data = compose_data("data.domains=corpus", f"data.root={corpus.parent}")
    assert data.sources.wiki.paths == ["corpus/wiki"]


def test_heldout_text_of_a_directory_replaces_that_of_the_sources(corpus, tmp_path):
    write(tmp_path / "test/wiki", 10)
    write(tmp_path / "test/my-code", 10)
    words = [f"data.domains={corpus}", f"data.heldout_domains={tmp_path}/test"]
    sources = compose_data(*words).sources
    assert sources.wiki.heldout_paths == [f"{tmp_path}/test/wiki"]
    assert sources["my-code"].heldout_paths == [f"{tmp_path}/test/my-code"]
    assert sources.Web_2.heldout_paths == []


def test_heldout_text_of_a_directory_for_the_sources_of_a_preset(tmp_path):
    write(tmp_path / "test/code", 10)
    sources = compose_data(f"data.heldout_domains={tmp_path}/test").sources
    assert sources.code.heldout_paths == [f"{tmp_path}/test/code"]
    assert sources.prose.heldout_paths == []


def test_equal_sources_are_an_equal_run(corpus):
    one = resolve_config(compose_config([f"data.domains={corpus}", "~data.sources.my-code"]))
    words = [
        "~data.sources.code",
        "~data.sources.prose",
        "~data.sources.data",
        f"+data.sources.Web_2={{paths:[{corpus}/Web_2],weight:12}}",
        f"+data.sources.wiki={{paths:[{corpus}/wiki],weight:345}}",
        "data.name=corpus",
    ]
    assert one == resolve_config(compose_config(words))


def test_mixtures_vary_the_directories(corpus):
    axes = load_sweep_axes(["study.mixture.num_mixtures=3", f"data.domains={corpus}"]).axes
    timeline = axes["phase.timeline"][1]
    config = resolve_config(
        compose_config([f"data.domains={corpus}", f"phase.timeline={timeline}"])
    )
    assert [*(config.phase.timeline[0].weights or {})] == ["Web_2", "my-code", "wiki"]


def test_file_of_the_user_names_the_directory(corpus, tmp_path, monkeypatch):
    file = tmp_path / "conf/data/mine.yaml"
    file.parent.mkdir(parents=True)
    text = f"name: mine\nsources: {{}}\ndomains: {corpus}\ntokenizer: embedded\neos_token: <eos>\n"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["hlat", "--config-dir", str(tmp_path / "conf")])
    data = compose_data("data=mine", "data.sources.wiki.weight=2")
    assert (data.name, data.sources.wiki.weight, data.domains) == ("corpus", 2, None)


def test_sweep_composes_the_directories(corpus):
    """Hydra composes a sweep by another path than a run."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from hlat.config.compose import register_configs
    from hlat.config.package_dirs import find_package_dir

    register_configs()
    words = [f"data.domains={corpus}", "data.sources.wiki.weight=3", "run.seed=1,2"]
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", words, RunMode.MULTIRUN)
        after = loader.load_configuration("config", [], RunMode.RUN)
    assert OmegaConf.select(config, "data.sources.wiki.weight") == 3
    assert [*config.hydra.overrides.task] == words
    assert "wiki" not in after.data.sources


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be listed (No such file or directory); give a local directory"),
        (Path.mkdir, "has no directories; give a directory with one directory per source"),
        (lambda path: write(path, 3, "a.txt"), "has no directories"),
        (
            lambda path: [write(path / "wiki", 3), write(path, 1, "README.md")],
            "has 1 files beside its directories, such as README.md; move them",
        ),
        (lambda path: (path / "wiki").mkdir(parents=True), "wiki is empty; fill or remove it"),
        (
            lambda path: write(path / "wiki", 9, "a.txt"),
            "wiki has no Arrow or Parquet files, but a.txt; convert the text with `hlat prepare",
        ),
        (lambda path: write(path / "wiki", 0), "wiki has no Arrow or Parquet files"),
        (lambda path: write(path / "维基", 3), "维基 has a name that no source can have"),
        (lambda path: write(path / "ويكي", 3), "ويكي has a name that no source can have"),
        (lambda path: write(path / "my code", 3), "rename it with letters"),
        (lambda path: write(path / "2024", 3), "a letter first"),
        (lambda path: write(path / "a.b", 3), "rename it with letters"),
        (lambda path: write(path / "mean", 3), "not mean, null"),
        (lambda path: write(path / "True", 3), "rename it with letters"),
    ],
)
def test_directory_without_sources_is_an_error_with_its_path(tmp_path, make, message):
    make(tmp_path / "corpus")
    with pytest.raises(ConfigError) as error:
        compose_data(f"data.domains={tmp_path}/corpus")
    (problem,) = error.value.problems
    assert f"{tmp_path}/corpus" in problem
    assert message in problem
    assert "\n" not in problem


def test_remote_directory_is_an_error():
    with pytest.raises(ConfigError, match="give a local directory with one directory per source"):
        compose_data("data.domains=s3://bucket/corpus")


def test_heldout_text_without_its_source_is_an_error(corpus, tmp_path):
    write(tmp_path / "test/law", 10)
    words = [f"data.domains={corpus}", f"data.heldout_domains={tmp_path}/test"]
    with pytest.raises(ConfigError, match=r"law has no source of its name.*Web_2, my-code, wiki"):
        compose_data(*words)
