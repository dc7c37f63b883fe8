"""Who hears of a run: what is installed, and under which name W&B knows it."""

import importlib.util
import json

import pytest
from omegaconf import OmegaConf

from hlat.config.errors import ConfigError
from hlat.tracking import services


@pytest.fixture
def config(compose):
    return lambda *names: OmegaConf.to_object(compose(f"tracking.services=[{','.join(names)}]"))


def test_what_is_not_installed_is_refused_with_what_to_install(config, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        services.refuse_missing(config("wandb", "tensorboard"))
    assert error.value.problems[0] == (
        "tracking.services=wandb: the package wandb is not installed; pip install 'hlat[wandb]', "
        "or leave it out"
    )
    assert len(error.value.problems) == 2


def test_a_folder_of_that_name_is_no_package(config, tmp_path, monkeypatch):
    (tmp_path / "not_a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not services._is_installed("not_a_package")
    services.refuse_missing(config("wandb", "tensorboard"))


def test_a_name_is_drawn_once_and_kept(config, tmp_path):
    first = services.identities(config("wandb"), tmp_path, {})
    assert len(first["wandb"]) == 8
    assert services.identities(config("wandb"), tmp_path, {}) == first
    (tmp_path / "services.json").unlink()
    assert services.identities(config("wandb"), tmp_path, {}) != first


def test_the_run_folders_word_counts_then_the_checkpoints(config, tmp_path):
    saved = {"wandb": "aaaaaaaa"}
    assert services.identities(config("wandb"), tmp_path, saved) == saved
    (tmp_path / "services.json").write_text(json.dumps({"wandb": "bbbbbbbb"}))
    assert services.identities(config("wandb"), tmp_path, saved) == {"wandb": "bbbbbbbb"}
    (tmp_path / "services.json").write_text("{torn")
    assert services.identities(config("wandb"), tmp_path, saved) == saved


def test_a_run_that_nobody_names_keeps_nothing(config, tmp_path):
    assert services.identities(config("tensorboard"), tmp_path, {}) == {}
    assert not [*tmp_path.iterdir()]
