"""Files of the user: loading, messages, copies and the identity of a run."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hlat.config import components, extensions, frozen_config
from hlat.config.completion import complete_override
from hlat.config.compose import compose_config, register_configs
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.sweep_axes import load_sweep_axes
from hlat.tracking import finished_runs

GATE = '''
"""A gate."""
from dataclasses import dataclass
from hlat.config.components import register_component
from hlat.model.attention_spec import AttentionSpec

@dataclass
class GateConfig:
    scale: float = 2.0

register_component("model.attention", "gate", "Text.", AttentionSpec(), GateConfig, int)
'''


RECIPE = """
from hlat.config.components import register_component
from hlat.config.precision import *

register_component(
    "precision", "mine", "Text.", PrecisionConfig(*["?"] + [Dtype.bf16] * 6, rounding="stochastic")
)
"""


@pytest.fixture(autouse=True)
def _forget_extensions(monkeypatch) -> Iterator[None]:
    before = components.list_registered()
    monkeypatch.setattr(extensions, "_loaded", {})
    yield
    components.remove_components(components.list_registered() - before)
    ConfigStore.instance().repo.pop("precision", None)
    register_configs()  # the schema and the choices without them


@pytest.fixture
def gate(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("gate.py").write_text(GATE)
    return "extensions=[gate.py]"


@pytest.mark.parametrize("word", ["extensions=[gate.py]", "extensions=gate.py"])
def test_compose_with_a_file_of_the_command_line(gate, word) -> None:
    extensions.load_from_command_line(["model=tiny", word])
    config = resolve_config(compose_config([gate, "model.attention.kind=gate"]))
    assert config.extensions == ["gate.py"]
    assert config.model.attention.gate.scale == 2.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = (", "line 1: SyntaxError: '(' was never closed"),
        ("\nimport nix_lib", "line 2: ModuleNotFoundError: No module named 'nix_lib'"),
        ("x = 1\nx.y", "line 2: AttributeError: 'int' object has no attribute 'y'"),
        ("x = 1", "it registers no component; call register_component"),
        ("import hlat.model.mlp_spec", "it registers no component; call register_component"),
        (GATE + "\n1 / 0", "line 13: ZeroDivisionError: division by zero"),
        (
            GATE + "\nregister_component('model.mlp', 'dense', '')",
            "line 13: model.mlp already has a component dense; choose another name",
        ),
    ],
)
def test_name_the_line_of_an_error(gate, content, message) -> None:
    Path("gate.py").write_text(content)
    before = components.list_registered()
    with pytest.raises(ConfigError) as error:
        extensions.load_from_command_line([gate])
    assert str(error.value) == f"extensions=gate.py: {message}"
    assert components.list_registered() == before
    assert "hlat_extensions.gate" not in sys.modules


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("extensions=[nix.py]", "extensions=nix.py: No such file or directory; name a Python file"),
        ("extensions=[.]", "extensions=.: Is a directory; name a Python file"),
        ("extensions=[my-gate.py]", "extensions=my-gate.py needs a name of letters, digits and _"),
        ("extensions=a.py,b.py", "all runs of a sweep have the same files; write [FILE,FILE]"),
        ("extensions=[gate.py,other/gate.py]", "gate.py has the same name; rename one of them"),
    ],
)
def test_refuse_a_wrong_path(gate, word, message) -> None:
    Path("my-gate.py").write_text(GATE)
    Path("other").mkdir()
    Path("other/gate.py").write_text(GATE + "\n")
    with pytest.raises(ConfigError) as error:
        extensions.load_from_command_line([word])
    assert message in str(error.value)


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(RECIPE)
    return "extensions=[recipe.py]"


@pytest.mark.slow
def test_compose_with_a_recipe(recipe) -> None:
    extensions.load_from_command_line([recipe])
    config = resolve_config(compose_config([recipe, "precision=mine"]))
    same = resolve_config(compose_config(["precision=bf16_sr", "precision.name=mine"]))
    assert config.precision == same.precision
    axes = load_sweep_axes([recipe, "precision=fp32,mine", "precision.rounding=nearest"]).axes
    assert axes == {"precision": ["fp32", "mine"]}
    assert complete_override(["precision=m"]) == ["precision=mine", "precision=mixed"]
    with pytest.raises(
        ConfigError, match=r"does not exist;.* choices: bf16, .*, fp32, mine, mixed"
    ):
        compose_config([recipe, "precision=my"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("mine", "mixed", "precision already has a component mixed; choose another name"),
        ('"Text.", Pre', '"Text.", int or Pre', "the specification of precision=mine is no Prec"),
        ('"precision"', '"batch"', "'batch' has no components; register one in model.attention, "),
    ],
)
def test_refuse_a_wrong_recipe(recipe, before, after, message) -> None:
    Path("recipe.py").write_text(RECIPE.replace(before, after, 1))
    with pytest.raises(ConfigError, match=message):
        extensions.load_from_command_line([recipe])


def test_a_job_has_the_recipe_of_its_submission(recipe, monkeypatch, tmp_path) -> None:
    extensions.load_from_command_line([recipe])
    composed = compose_config([recipe, "precision=mine"])
    command_line = frozen_config.CommandLine([recipe], [])
    frozen_config.save_frozen_config(tmp_path, composed, command_line)
    components.remove_components({("precision", "mine")})
    monkeypatch.setattr(extensions, "_loaded", {})
    loaded = resolve_config(frozen_config.load_frozen_config(tmp_path))
    assert loaded == resolve_config(composed)


def test_no_file_can_name_an_extension(gate) -> None:
    with pytest.raises(ConfigError, match="is set by a file, and Python code is loaded only from"):
        compose_config([gate])


@pytest.mark.slow
def test_the_content_is_part_of_the_identity_of_a_run(gate, monkeypatch, tmp_path) -> None:
    names, identities = [], []
    for content in (GATE, GATE, GATE + "\n"):
        before = components.list_registered()
        monkeypatch.setattr(extensions, "_loaded", {})
        Path("gate.py").write_text(content)
        extensions.load_from_command_line([gate])
        config = resolve_config(compose_config([gate]))
        names.append(config.run.name)
        identities.append(finished_runs.build_identity(tmp_path, config, {})["identity"])
        components.remove_components(components.list_registered() - before)
    assert names[0] == names[1] != names[2]
    assert identities[0] == identities[1] != identities[2]


def test_copy_and_describe_a_changed_file(gate, tmp_path) -> None:
    extensions.load_from_command_line([gate])
    extensions.save_copies(tmp_path / "copies", ["gate.py"])
    assert extensions.describe_changes(tmp_path / "copies", ["gate.py"]) == []
    (tmp_path / "copies/gate.py").write_text(GATE.replace("2.0", "3.0"))
    (message,) = extensions.describe_changes(tmp_path / "copies", ["gate.py"])
    assert message == (
        "gate.py has changed since the last start:\n    -    scale: float = 3.0\n"
        "    +    scale: float = 2.0"
    )
    extensions.save_copies(tmp_path / "copies", ["gate.py"])
    assert len(os.listdir(tmp_path / "copies")) == 2
    assert (tmp_path / "copies/gate.py").read_text() == GATE


def test_a_job_loads_the_copy_of_its_submission(gate, monkeypatch, tmp_path) -> None:
    extensions.load_from_command_line([gate])
    composed = compose_config([gate, "model.attention.kind=gate"])
    (tmp_path / "job").mkdir()
    command_line = frozen_config.CommandLine([gate], [])
    frozen_config.save_frozen_config(tmp_path / "job", composed, command_line)
    components.remove_components({("model.attention", "gate")})
    monkeypatch.setattr(extensions, "_loaded", {})
    Path("gate.py").unlink()  # after the submission
    loaded = frozen_config.load_frozen_config(tmp_path / "job")
    assert OmegaConf.select(loaded, "model.attention.gate.scale") == 2.0
    assert resolve_config(loaded).extensions == ["gate.py"]


@pytest.mark.parametrize("prefix", ["", "--"])
def test_the_command_of_a_job_names_its_copies(tmp_path, gate, prefix: str) -> None:
    extensions.load_from_command_line([f"{prefix}{gate}"])
    (tmp_path / "1").mkdir()
    copied = extensions.copy_to_submission(tmp_path / "1", f"{prefix}{gate}")
    file = tmp_path / "1/extensions/gate.py"
    assert copied == f'extensions=["{file}"]'
    assert file.read_bytes() == Path("gate.py").read_bytes()
    assert extensions.copy_to_submission(tmp_path / "1", "limit=3") == "limit=3"
    extensions.validate_job_files([f"{prefix}{gate}"], shares_file_system=True)
    with pytest.raises(ConfigError, match="the job has no access to files of this machine"):
        extensions.validate_job_files([f"{prefix}{gate}"], shares_file_system=False)
