"""Tests of the tracking services: installed libraries and run ids."""

import importlib.util
import json

import pytest
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.tracking import tracking_services


@pytest.fixture
def config(compose):
    return lambda *names: OmegaConf.to_object(compose(f"tracking.services=[{','.join(names)}]"))


def test_missing_library_is_an_error_with_install_command(config, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        tracking_services.validate_installed_services(config("wandb", "tensorboard"))
    assert error.value.problems[0] == (
        "tracking.services=wandb: the package wandb is not installed; pip install 'hlat[wandb]', "
        "or remove the service"
    )
    assert len(error.value.problems) == 2


def test_directory_without_code_is_not_a_package(config, tmp_path, monkeypatch):
    (tmp_path / "not_a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not tracking_services._is_installed("not_a_package")
    tracking_services.validate_installed_services(config("wandb", "tensorboard"))


def test_run_id_is_stored_in_the_run_directory(config, tmp_path):
    first = tracking_services.load_service_run_ids(config("wandb"), tmp_path, {})
    assert len(first["wandb"]) == 8
    assert tracking_services.load_service_run_ids(config("wandb"), tmp_path, {}) == first
    (tmp_path / "services.json").unlink()
    assert tracking_services.load_service_run_ids(config("wandb"), tmp_path, {}) != first


def test_ids_in_the_run_directory_take_precedence_over_the_checkpoint(config, tmp_path):
    saved = {"wandb": "aaaaaaaa"}
    assert tracking_services.load_service_run_ids(config("wandb"), tmp_path, saved) == saved
    (tmp_path / "services.json").write_text(json.dumps({"wandb": "bbbbbbbb"}))
    assert tracking_services.load_service_run_ids(config("wandb"), tmp_path, saved) == {
        "wandb": "bbbbbbbb"
    }
    (tmp_path / "services.json").write_text("{torn")
    assert tracking_services.load_service_run_ids(config("wandb"), tmp_path, saved) == saved


def test_services_without_ids_store_nothing(config, tmp_path):
    assert tracking_services.load_service_run_ids(config("tensorboard"), tmp_path, {}) == {}
    assert not [*tmp_path.iterdir()]
