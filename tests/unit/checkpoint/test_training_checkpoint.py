"""State that a checkpoint of another optimizer, or of other settings, lacks."""

import pytest

from hlat.checkpoint.checkpoint_manifest import CheckpointManifest, TensorRecord
from hlat.checkpoint.training_checkpoint import list_fresh_state, list_restarted_parameters
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.config.run_identity import build_saved_optimizer_config
from hlat.model.decoder_spec import list_parameter_specs
from hlat.optim.optimizer_spec import get_optimizer_spec
from hlat.optim.soap_spec import SoapConfig

PARAMETERS = list_parameter_specs(ModelConfig("tiny", 1, 4, 6, 2, 1, 9))
MATRICES = {one.name for one in PARAMETERS if one.name.endswith("_proj.weight")}


def build_settings(name: str, **settings) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=1.0, **settings)


def build_manifest(settings: OptimizerConfig) -> CheckpointManifest:
    """Return the manifest of a run."""
    spec, tensors = get_optimizer_spec(settings.name), {}
    for one in PARAMETERS:
        shapes = spec.compute_state_shapes(settings, one.role, one.shape)
        for key, shape in {"weights": one.shape, "updates": (), **shapes}.items():
            tensors[f"{key}/{one.name}"] = TensorRecord("F32", shape, ())
    return CheckpointManifest(1, {}, tensors)


LARGE, SMALL = (
    build_settings("soap", soap=SoapConfig(max_preconditioner_dim=size)) for size in (100, 4)
)


@pytest.mark.parametrize("settings", [build_settings("normuon"), LARGE, SMALL])
def test_the_state_of_the_same_settings_continues(settings: OptimizerConfig) -> None:
    manifest = build_manifest(settings)
    assert list_fresh_state(PARAMETERS, settings, manifest) == {}
    assert list_restarted_parameters(PARAMETERS, settings, manifest) == set()


def test_matrices_of_another_optimizer_restart() -> None:
    manifest = build_manifest(build_settings("muon"))
    fresh = list_fresh_state(PARAMETERS, build_settings("normuon"), manifest)
    assert {key.name: {*names} for key, names in fresh.items()} == {
        "momentum_buffer": MATRICES,
        "second_momentum_buffer": MATRICES,
    }
    restarted = list_restarted_parameters(PARAMETERS, build_settings("normuon"), manifest)
    assert restarted == MATRICES


@pytest.mark.parametrize(("before", "after"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_another_maximum_dimension_restarts_all_matrices(before, after) -> None:
    manifest = build_manifest(before)
    assert list_restarted_parameters(PARAMETERS, after, manifest) == MATRICES
    fresh = list_fresh_state(PARAMETERS, after, manifest)
    bases = {"left_gram", "left_basis", "right_gram", "right_basis"}
    assert {tensor.name for tensor in fresh} > {"exp_avg"} | (bases if after is LARGE else set())
    assert {name for names in fresh.values() for name in names} == MATRICES


def test_the_common_moment_of_two_optimizers_restarts_with_the_count() -> None:
    manifest = build_manifest(build_settings("lion"))
    settings = build_settings("adamw", ema_decay=0.9)
    fresh = list_fresh_state(PARAMETERS, settings, manifest)
    everything = {one.name for one in PARAMETERS}
    assert {key.name: {*names} for key, names in fresh.items()} == {
        "exp_avg": everything,
        "exp_avg_sq": everything,
        "ema": everything,
    }
    manifest.tensors.update({f"ema/{name}": TensorRecord("F32", (), ()) for name in everything})
    fresh = list_fresh_state(PARAMETERS, settings, manifest)
    assert {key.name for key in fresh} == {"exp_avg", "exp_avg_sq"}


def test_saved_settings_of_an_optimizer_give_its_shapes() -> None:
    saved = {"optimizer.name": "soap", "optimizer.soap": {"max_preconditioner_dim": 7}}
    found = build_saved_optimizer_config({**saved, "optimizer.lr": 1e-3, "optimizer.former": 1})
    assert (found.name, found.soap.max_preconditioner_dim) == ("soap", 7)
    assert build_saved_optimizer_config({}).name == OptimizerConfig.name


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"optimizer.name": "soap", "optimizer.soap": {"size": 7}}, "another version"),
        ({"optimizer.name": "soap", "optimizer.soap": 7}, "another version"),
        ({"optimizer.name": [1]}, "unknown"),
        ({"optimizer.name": None}, "unknown"),
    ],
)
def test_saved_settings_that_cannot_be_read_are_an_error(saved: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_saved_optimizer_config(saved)
