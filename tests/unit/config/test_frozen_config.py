"""Frozen configurations equal the composed ones, and contain no secrets."""

import shlex
import sys

import pytest
from omegaconf import OmegaConf

from hlat.config import entry_point, frozen_config
from hlat.config.config_errors import ConfigError
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.run import Config

COMMAND_LINE = frozen_config.CommandLine(
    ["model=tiny", "run.name=a b"], ["--config-dir", "x", "hydra/launcher=slurm"]
)
CHOICES = [
    *("model=tiny", "model=gemma3_tiny", "model=olmo3_tiny"),
    *(
        f"experiment={file.stem}"
        for file in sorted((find_package_dir("conf") / "experiment").glob("*.yaml"))
    ),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_round_trip(choice, compose, tmp_path):
    composed = compose(choice)
    frozen_config.save_frozen_config(tmp_path, composed, COMMAND_LINE)
    loaded = frozen_config.load_frozen_config(tmp_path)
    assert OmegaConf.get_type(loaded) is Config
    assert OmegaConf.to_object(loaded) == OmegaConf.to_object(composed)
    assert frozen_config.load_command_line(tmp_path) == COMMAND_LINE


def test_yaml_is_that_of_omegaconf_and_equal_sections_are_formatted_once(compose, monkeypatch):
    formatted = []
    to_yaml = OmegaConf.to_yaml
    monkeypatch.setattr(
        frozen_config.OmegaConf,
        "to_yaml",
        lambda config: formatted.append([*config]) or to_yaml(config),
    )
    for choice in CHOICES:
        composed = compose(choice)
        assert frozen_config.format_config(composed) == to_yaml(composed)
    for seed in (1, 2):
        formatted.clear()
        composed.run.seed = seed
        assert frozen_config.format_config(composed) == to_yaml(composed)
        assert formatted == [["run"]]
    assert frozen_config.format_config(OmegaConf.create()) == to_yaml(OmegaConf.create())


def test_secrets_are_resolved_where_the_job_runs(compose, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "before")
    frozen_config.save_frozen_config(tmp_path, compose("data.root=${oc.env:SECRET}"), COMMAND_LINE)
    assert not [file for file in tmp_path.iterdir() if "before" in file.read_text()]
    monkeypatch.setenv("SECRET", "after")
    assert resolve_config(frozen_config.load_frozen_config(tmp_path)).data.root == "after"


def test_a_job_has_the_submitted_overrides(compose, tmp_path, monkeypatch):
    frozen_config.save_frozen_config(tmp_path, compose(), COMMAND_LINE)
    monkeypatch.setattr(sys, "argv", ["hlat.train", "--frozen", str(tmp_path)])
    assert entry_point.get_task_overrides() == COMMAND_LINE.overrides
    again = [sys.executable, "-m", "hlat.train", "--frozen", str(tmp_path)]
    assert entry_point.build_command(entry_point.get_task_overrides()) == again
    typed = shlex.split(entry_point.format_resume_command(entry_point.get_task_overrides()))
    assert typed == ["hlat", "train", *COMMAND_LINE.flags, *COMMAND_LINE.overrides]


def test_a_directory_without_a_configuration_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"--frozen .*config\.yaml: No such file"):
        frozen_config.load_frozen_config(tmp_path)
