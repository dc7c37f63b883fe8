"""What a job reads is what was composed, with secrets where they were."""

import shlex
import sys

import pytest
from omegaconf import OmegaConf

from hlat.config import entry, frozen
from hlat.config.errors import ConfigError, Exit
from hlat.config.folders import folder
from hlat.config.resolve import resolve
from hlat.config.run import Config

WORDS = frozen.Words(["model=tiny", "run.name=a b"], ["--config-dir", "x", "hydra/launcher=slurm"])
CHOICES = [
    *(f"model={file.stem}" for file in sorted((folder("conf") / "model").glob("*.yaml"))),
    *(f"experiment={file.stem}" for file in sorted((folder("conf") / "experiment").glob("*.yaml"))),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_configuration_comes_back(choice, compose, tmp_path):
    composed = compose(choice)
    frozen.save(tmp_path, composed, WORDS)
    loaded = frozen.load(tmp_path)
    assert OmegaConf.get_type(loaded) is Config
    assert OmegaConf.to_object(loaded) == OmegaConf.to_object(composed)
    assert frozen.words(tmp_path) == WORDS


def test_a_secret_is_looked_up_where_the_job_runs(compose, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "before")
    frozen.save(tmp_path, compose("data.root=${oc.env:SECRET}"), WORDS)
    assert not [file for file in tmp_path.iterdir() if "before" in file.read_text()]
    monkeypatch.setenv("SECRET", "after")
    assert resolve(frozen.load(tmp_path)).data.root == "after"


def test_a_job_goes_on_as_it_was_sent(compose, tmp_path, monkeypatch):
    frozen.save(tmp_path, compose(), WORDS)
    monkeypatch.setattr(sys, "argv", ["hlat.train", "--frozen", str(tmp_path)])
    assert entry.overrides() == WORDS.overrides
    again = ["python", "-m", "hlat.train", "--frozen", str(tmp_path)]
    assert entry.command("python", entry.overrides()) == again
    typed = shlex.split(entry.resume_command(Exit.PREEMPTED, entry.overrides()))
    assert typed == ["python", "-m", "hlat.train", *WORDS.flags, *WORDS.overrides]


def test_a_folder_without_one_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"--frozen .*config\.yaml: No such file"):
        frozen.load(tmp_path)
