"""Errors of Hydra are converted to a message with the full key and the nearest valid one."""

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from hlat.config.hydra_errors import convert_hydra_error, list_config_keys

CASES = [
    ("modle=7b", "modle is not a key of the configuration; did you mean model?"),
    (
        "model=7bb",
        "model=7bb does not exist; did you mean 7b? choices: 13b, 160m, 1b, 70b, 7b, arcee_desk",
    ),
    (
        "optimizer.beta3=1",
        "optimizer.beta3 is not a key of the configuration; did you mean optimizer.beta2?",
    ),
    ("model.num_layer=1", "did you mean model.num_layers?"),
    ("zzz.qqq=1", "zzz.qqq is not a key of the configuration; `--cfg job` prints all keys"),
    ("batch.zzz=1", "batch has global_batch_size, micro_batch_size, sequence_length"),
    (
        "batch.global_batch_size=many",
        "batch.global_batch_size=many: Value 'many' of type 'str' could not be converted to Integer",
    ),
    (
        "schedule.name=cosin",
        "schedule.name=cosin: Invalid value 'cosin', expected one of [constant, cosine, hlat, linear, wsd]",
    ),
    ("+model=7b", "Multiple values for model"),
]


@pytest.mark.parametrize(("override", "sentence"), CASES)
def test_errors_are_one_line(compose, override, sentence):
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        compose(override)
    assert sentence in str(convert_hydra_error(caught.value))
    assert "\n" not in str(convert_hydra_error(caught.value))


def test_keys_reach_every_level():
    assert {"model", "model.rope_theta", "checkpoint.keep_last", "run.log_every"} <= set(
        list_config_keys()
    )
