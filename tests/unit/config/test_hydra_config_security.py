"""Hydra runs no code of an untrusted configuration: no case creates the file of its code."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathElement
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hlat.config.compose import register_configs
from hlat.config.config_errors import ConfigError
from hlat.config.config_loader import SafeConfigLoader
from hlat.config.hydra_config_security import find_code_references
from hlat.config.hydra_errors import convert_hydra_error
from hlat.config.package_dirs import find_package_dir

Entry = Callable[..., "subprocess.CompletedProcess[str]"]

TOUCH = "{_target_: pathlib.Path.touch, self: {_target_: pathlib.Path, _args_: [TRACE]}}"
LOG = '{version: 1, root: {level: INFO}, formatters: {x: {"()": pathlib.Path.touch, self: TRACE}}}'
LAUNCHER = "hydra_plugins.hlat_launchers.local._local_launcher.LocalLauncher"

FILES: dict[str, tuple[dict[str, str], list[str], str]] = {
    "callback": (
        {"experiment/x": f"# @package _global_\nhydra: {{callbacks: {{x: {TOUCH}}}}}"},
        ["experiment=x"],
        "hydra.callbacks.x",
    ),
    "callback of a group": (
        {
            "hydra/callbacks/x": f"x: {TOUCH}",
            "experiment/x": "# @package _global_\ndefaults: [override /hydra/callbacks: x]",
        },
        ["experiment=x"],
        "hydra.callbacks.x",
    ),
    "logging": (
        {"experiment/x": f"# @package _global_\nhydra: {{job_logging: {LOG}}}"},
        ["experiment=x"],
        "hydra.job_logging.formatters",
    ),
    "logging of a group": (
        {"hydra/hydra_logging/x": LOG},
        ["hydra/hydra_logging=x"],
        "hydra.hydra_logging.formatters",
    ),
    "logging elsewhere": (
        {"hydra/job_logging/x": "{version: 1, root: '${hydra.sweeper}'}"},
        ["hydra/job_logging=x"],
        "hydra.job_logging.root",
    ),
    "launcher": (
        {"hydra/launcher/x": f"_target_: {LAUNCHER}\nx: [{TOUCH}]"},
        ["-m", "hydra/launcher=x"],
        "hydra.launcher.x.0._target_",
    ),
    "launcher that is computed": (
        {"hydra/launcher/x": f"_target_: {LAUNCHER}\nx: ${{oc.create:{{a:b}}}}"},
        ["-m", "hydra/launcher=x"],
        "hydra.launcher.x",
    ),
    "sweeper": (
        {"hydra/sweeper/x": f"_target_: hydra._internal.x\nx: {TOUCH}"},
        ["-m", "hydra/sweeper=x"],
        "hydra.sweeper.x._target_",
    ),
    "variable": (
        {"experiment/x": "# @package _global_\nhydra: {job: {env_set: {LD_PRELOAD: TRACE}}}"},
        ["experiment=x"],
        "hydra.job.env_set.LD_PRELOAD",
    ),
    "another root": ({"config": f"x: {TOUCH}"}, ["--config-name=config"], "x._target_"),
}


def _write_files(folder: Path, case: str) -> Path:
    """Write the files of a case, and return the path of the file that its code would create."""
    for name, content in FILES[case][0].items():
        file = folder / "theirs" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.replace("TRACE", str(folder / "trace")))
    return folder / "trace"


@pytest.mark.parametrize("case", [case for case in FILES if case != "another root"])
def test_a_configuration_that_names_code_is_rejected(tmp_path: Path, case: str) -> None:
    _, arguments, key = FILES[case]
    trace = _write_files(tmp_path, case)
    overrides = [word for word in arguments if word != "-m"]
    search_path = create_config_search_path(str(find_package_dir("conf")))
    element = SearchPathElement("command-line", f"file://{tmp_path}/theirs")
    search_path.get_path().insert(-1, element)  # the schema is the last
    register_configs()
    with pytest.raises((ConfigError, HydraException)) as raised:
        SafeConfigLoader(search_path).load_configuration("config", overrides, RunMode.RUN)
    assert not trace.exists()
    error = raised.value
    converted = error if isinstance(error, ConfigError) else convert_hydra_error(error)
    assert any(problem.startswith(key) for problem in converted.problems)


IN_A_PROCESS = ["callback", "logging of a group", "launcher", "another root"]


@pytest.mark.parametrize("case", IN_A_PROCESS)
def test_code_is_rejected_before_it_runs(tmp_path: Path, hlat: Entry, case: str) -> None:
    _, arguments, key = FILES[case]
    trace = _write_files(tmp_path, case)
    flag = "--config-path" if case == "another root" else "--config-dir"
    done = hlat("train", f"{flag}={tmp_path / 'theirs'}", *arguments)
    assert not trace.exists()
    assert done.returncode == 2, done.stderr
    assert f"hlat: {key}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_override_that_names_code_is_rejected(hlat: Entry) -> None:
    done = hlat("train", "+hydra.callbacks.x._target_=pathlib.Path.cwd")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hydra.callbacks.x" in done.stderr


SEARCH_PATH = "hydra: {searchpath: ['pkg://theirs']}\ndefaults: [config]"
IMPORTED = {
    "search path of a primary configuration": (["--config-dir=.", "--config-name=theirs"], None),
    "typed search path": (["hydra.searchpath=[pkg://theirs]"], None),
    "added search path": (["+hydra.searchpath=[pkg://theirs]"], None),
    "package": (["--config-path=pkg://theirs"], "pkg://theirs"),
    "rerun": (["--experimental-rerun=theirs.yaml"], "--experimental-rerun"),
    "abbreviated rerun": (["--exp", "theirs.yaml"], "--experimental-rerun"),
}


@pytest.mark.parametrize("case", IMPORTED)
@pytest.mark.slow_after(3)
def test_refuse_to_import_a_package_or_unpickle_a_file(
    tmp_path: Path, hlat: Entry, case: str
) -> None:
    arguments, name = IMPORTED[case]
    (tmp_path / "theirs.yaml").write_text(SEARCH_PATH)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("open('trace', 'w')")
    done = hlat("train", *arguments, "data.preview=1")
    assert not (tmp_path / "trace").exists()
    assert (done.returncode, done.stdout) == (2, "")
    assert f"hlat: {name or 'hydra.searchpath'}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_settings_of_hydra_still_work(hlat: Entry) -> None:
    arguments = ["hydra.verbose=true", "hydra.job_logging.root.level=DEBUG", "hydra.sweep.subdir=x"]
    done = hlat("train", "--cfg", "hydra", *arguments)
    assert done.returncode == 0, done.stderr


def test_plugins_of_hlat_and_resolvers_are_accepted() -> None:
    plugin = {"_target_": LAUNCHER, "x": ["${run.name}-${now:%Y-%m-%d}-${oc.env:HOME,}"]}
    logging = {"version": 1, "root": None}
    section = {"launcher": plugin, "sweeper": {"params": {"run.name": "a,b"}}, "job": {}}
    section |= {"hydra_logging": logging, "job_logging": logging}
    assert list(find_code_references(OmegaConf.create({"hydra": section}))) == []
    plugin["y"] = "${oc.${run.name}:x}"
    assert len(list(find_code_references(OmegaConf.create({"hydra": section})))) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.lr=2e-3", "run.seed=3"],
        ["optimizer=adamw_hlat_7b", "optimizer.lr=2e-3", "hydra.job.chdir=true"],
        ["run.name='a b'", "+hardware.peak_tflops={fp32:1.5}", "run.steps=${oc.env:N}"],
        ["model=tiny", "run.seed=1", "run.seed=2"],
    ],
)
def test_values_are_applied_to_a_shared_configuration_as_hydra_does(overrides, monkeypatch):
    monkeypatch.setenv("N", "7")
    register_configs()
    loader = SafeConfigLoader(create_config_search_path(str(find_package_dir("conf"))))

    def load() -> DictConfig:
        return loader.load_configuration("config", overrides, RunMode.RUN)

    original = ConfigLoaderImpl(loader.config_search_path)
    plain = original.load_configuration("config", overrides, RunMode.RUN)
    first, second = load(), load()
    for config in (first, second):
        assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(plain)
        assert OmegaConf.is_struct(config)
    first.run.seed = 99
    assert second.run.seed != 99
    for unknown in ("run.sed=1", "modell=tiny"):
        with pytest.raises(ConfigCompositionException):
            loader.load_configuration("config", [unknown], RunMode.RUN)
