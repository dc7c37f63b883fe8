"""What a job reads is what was composed, with secrets where they were."""

import shlex
import sys

import pytest
from omegaconf import OmegaConf

from hlat.config import entry_point, frozen_config
from hlat.config.config_errors import ConfigError
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.run import Config

WORDS = frozen_config.CommandLine(
    ["model=tiny", "run.name=a b"], ["--config-dir", "x", "hydra/launcher=slurm"]
)
CHOICES = [
    *("model=tiny", "model=gemma3_desk", "model=olmo3_desk"),
    *(
        f"experiment={file.stem}"
        for file in sorted((find_package_dir("conf") / "experiment").glob("*.yaml"))
    ),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_configuration_comes_back(choice, compose, tmp_path):
    composed = compose(choice)
    frozen_config.save_frozen_config(tmp_path, composed, WORDS)
    loaded = frozen_config.load_frozen_config(tmp_path)
    assert OmegaConf.get_type(loaded) is Config
    assert OmegaConf.to_object(loaded) == OmegaConf.to_object(composed)
    assert frozen_config.load_command_line(tmp_path) == WORDS


def test_a_secret_is_looked_up_where_the_job_runs(compose, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "before")
    frozen_config.save_frozen_config(tmp_path, compose("data.root=${oc.env:SECRET}"), WORDS)
    assert not [file for file in tmp_path.iterdir() if "before" in file.read_text()]
    monkeypatch.setenv("SECRET", "after")
    assert resolve_config(frozen_config.load_frozen_config(tmp_path)).data.root == "after"


def test_a_job_goes_on_as_it_was_sent(compose, tmp_path, monkeypatch):
    frozen_config.save_frozen_config(tmp_path, compose(), WORDS)
    monkeypatch.setattr(sys, "argv", ["hlat.train", "--frozen", str(tmp_path)])
    assert entry_point.get_task_overrides() == WORDS.overrides
    again = ["python", "-m", "hlat.train", "--frozen", str(tmp_path)]
    assert entry_point.build_command("python", entry_point.get_task_overrides()) == again
    typed = shlex.split(entry_point.format_resume_command(entry_point.get_task_overrides()))
    assert typed == ["python", "-m", "hlat.train", *WORDS.flags, *WORDS.overrides]


def test_a_folder_without_one_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"--frozen .*config\.yaml: No such file"):
        frozen_config.load_frozen_config(tmp_path)
