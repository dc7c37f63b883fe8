"""Overrides with former keys, and of dictionaries of structured values."""

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.base import Box, Node
from omegaconf.errors import ConfigAttributeError, ValidationError

from hlat.config import config_loader, renamed_keys
from hlat.config.components import create_schema_node
from hlat.config.compose import compose_config, register_configs
from hlat.config.config_copies import CopiedConfig
from hlat.config.config_errors import ConfigError
from hlat.config.data import SourceConfig
from hlat.config.resolve import convert_to_dataclasses
from hlat.config.run import Config, RunConfig

SOURCE = SourceConfig(paths=["x.arrow"], weight=0.3)


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    renamed_keys.print_once.cache_clear()
    config_loader.forget_compositions()


@pytest.mark.parametrize(
    "overrides",
    [
        ["+data.sources.mine={paths: [x.arrow], weight: 0.3}"],
        ["+data.sources.mine.weight=0.3", "+data.sources.mine.paths=[x.arrow]"],
    ],
)
def test_add_a_source(overrides: list[str]) -> None:
    sources = convert_to_dataclasses(compose_config(overrides)).data.sources
    assert sources["mine"] == SOURCE
    assert len(sources) > 1


@pytest.mark.parametrize(
    "override", ["+data.sources.mine={path: [x.arrow]}", "+data.sources.mine={weight: no}"]
)
def test_reject_a_source_that_does_not_fit_the_schema(override: str) -> None:
    with pytest.raises(ConfigError):
        compose_config([override])


def test_a_renamed_key_works_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose_config(["compiler.inductor=true"]).compiler.torch_compile is True
    assert "hlat: compiler.inductor is now compiler.torch_compile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("experiment=desk", "experiment=small_study"),
        ("recovery=desk", "recovery=interactive"),
    ],
)
def test_a_renamed_choice_has_the_same_content(former: str, present: str, capsys) -> None:
    assert compose_config([former]) == compose_config([present])
    assert f"hlat: {former} is now {present}; the next version rejects" in capsys.readouterr().err


def test_a_renamed_model_keeps_its_name_so_that_its_runs_resume() -> None:
    former, present = compose_config(["model=qwen3_desk"]), compose_config(["model=qwen3_tiny"])
    assert former.model.name == "qwen3_desk"
    former.model.name = "qwen3_tiny"
    assert former == present


def test_a_renamed_choice_works_with_a_warning(capsys, monkeypatch, tmp_path: Path) -> None:
    assert compose_config(["optimizer=small"]).optimizer.lr == 6e-4
    expected = "hlat: optimizer=small is now optimizer=adamw_small; the next version rejects"
    assert expected in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    (tmp_path / "optimizer").mkdir()
    header = "# @package _global_\ndefaults:\n  - override /optimizer: tiny\n  - _self_\n"
    (tmp_path / "model/nano.yaml").write_text(f"{header}model: {{name: nano}}\n")
    monkeypatch.setattr(sys, "argv", ["hlat", "--config-dir", str(tmp_path)])
    assert compose_config(["model=nano"]).optimizer.lr == 2e-3
    assert "optimizer=tiny is now optimizer=adamw_tiny" in capsys.readouterr().err
    (tmp_path / "optimizer/tiny.yaml").write_text("lr: 5e-3\n")  # a file of the user has its name
    assert compose_config(["model=nano"]).optimizer.lr == 5e-3
    assert capsys.readouterr().err == ""


def test_compositions_of_a_process_are_independent(monkeypatch, tmp_path: Path) -> None:
    first = compose_config(["model=tiny"], return_hydra_config=True)
    first.model.num_layers = 77
    first.data.sources = {}
    monkeypatch.chdir(tmp_path)
    second = compose_config(["model=tiny", "optimizer.lr=0.5"], return_hydra_config=True)
    third = compose_config(["model=tiny"], return_hydra_config=True)
    assert third.model.num_layers != 77
    assert third.data.sources
    assert (second.optimizer.lr, third.optimizer.lr) == (0.5, 2e-3)
    assert first.hydra.runtime.cwd != third.hydra.runtime.cwd == str(tmp_path)
    assert third.hydra.overrides.task == ["model=tiny"]


def test_copies_have_the_schema_and_the_flags_of_the_original() -> None:
    composed = compose_config(["model=tiny"])
    copies = CopiedConfig(composed)
    composed.run.seed = 1  # no effect on copies
    first, second = copies.copy(), copies.copy()
    assert first.run.seed != 1
    composed.run.seed = first.run.seed
    assert composed == first == second
    assert OmegaConf.to_yaml(first) == OmegaConf.to_yaml(composed)
    assert OmegaConf.get_type(first, "run") is OmegaConf.get_type(composed, "run") is RunConfig
    with pytest.raises(ValidationError):
        first.run.seed = "none"
    with pytest.raises(ConfigAttributeError):
        first.run.unknown = 1
    first.run.seed = 2
    assert second.run.seed != 2
    assert first.run._get_root() is first


def test_a_new_schema_is_unchanged_by_earlier_ones() -> None:
    created = [create_schema_node(Config) for _ in range(3)]
    assert created[0] == created[1] == created[2]
    created[1].run.seed = created[0].run.seed + 1
    assert created[2].run.seed == created[0].run.seed
    assert {OmegaConf.get_type(node, "run") for node in created} == {RunConfig}


def test_nodes_of_a_composition_have_their_container_as_parent() -> None:
    config = compose_config(["experiment=hlat_70b_upsample", "+sweep=beta2"])
    children = [(config, config._get_node(key)) for key in config]
    for parent, child in children:
        assert child._get_parent() is parent
        if isinstance(child, DictConfig | ListConfig) and isinstance(child._content, dict | list):
            keys = child._content if isinstance(child, DictConfig) else range(len(child))
            children += [(child, child._get_node(key)) for key in keys]
    assert len(children) > 250


def test_methods_are_restored_if_threads_create_schemas() -> None:
    methods = Node._get_flag, Box._re_parent
    with ThreadPoolExecutor(4) as pool:
        schemas = [dataclasses.make_dataclass(f"Schema{i}", [("x", int, i)]) for i in range(40)]
        nodes = list(pool.map(create_schema_node, schemas))
    assert [node.x for node in nodes] == [*range(40)]
    assert (Node._get_flag, Box._re_parent) == methods
    compose_config([])
    assert (Node._get_flag, Box._re_parent) == methods


def test_two_packages_of_one_file_do_not_share_nodes(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "axes").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "axes/mine.yaml").write_text("a: {b: 1}\n")
    packages = [f"/axes/mine@hydra.sweeper.params.{name}" for name in ("first", "second")]
    text = f"defaults: [{', '.join(packages)}, _self_]\n"
    text += "hydra: {sweeper: {params: {first: {a: {b: 2}}}}}\n"
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{text}")
    monkeypatch.setattr(sys, "argv", ["hlat", "--config-dir", str(tmp_path)])
    config = compose_config(["experiment=mine"], return_hydra_config=True)
    assert config.hydra.sweeper.params == {"first": {"a": {"b": 2}}, "second": {"a": {"b": 1}}}


def test_a_changed_file_of_the_user_is_read_again(monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "optimizer" / "mine.yaml"
    file.parent.mkdir()
    monkeypatch.setattr(sys, "argv", ["hlat", "--config-dir", str(tmp_path)])
    for lr in (1e-3, 2e-3):
        file.write_text(f"lr: {lr}\n")
        assert compose_config(["optimizer=mine"]).optimizer.lr == lr


def test_other_hardware_of_this_machine_is_composed_again(monkeypatch) -> None:
    for preset in ("cpu", "rtx_4090"):
        with monkeypatch.context() as patch:
            patch.setattr("hlat.config.compose.choose_local_hardware", lambda name=preset: name)
            assert compose_config(["hardware=local"]).hardware.name == preset
    register_configs()  # the hardware of this machine


def test_a_defaults_list_refers_to_choices(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    names = "defaults:\n  - override /optimizer: adamw_${batch}\n  - _self_\n"
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{names}")
    monkeypatch.setattr(sys, "argv", ["hlat", "--config-dir", str(tmp_path)])
    assert compose_config(["experiment=mine", "batch=tiny"]).optimizer.lr == 2e-3
    assert compose_config(["experiment=mine", "batch=small"]).optimizer.lr == 6e-4


def test_the_mode_of_a_command_imports_no_launcher(tmp_path: Path) -> None:
    program = """
import sys
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hlat.config.compose import register_configs
from hlat.config.package_dirs import find_package_dir
register_configs()
with initialize_config_dir(str(find_package_dir("conf")), version_base="1.3"):
    get_mode = GlobalHydra.instance().hydra.get_mode
    words = ["model=tiny", "run.steps=1"]
    print(get_mode("config", words), get_mode("config", [*words, "hydra.mode=MULTIRUN"]))
print([name for name in sys.modules if "hlat_launchers" in name and name.endswith("_launcher")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout == "None RunMode.MULTIRUN\n[]\n"
