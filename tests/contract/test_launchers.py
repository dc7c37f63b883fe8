"""Contract of the launchers: the properties that Hydra's test suite requires of a launcher.

Hydra's suite calls a task function in this process and checks its return value. The launchers of
hlat start hlat.train in other processes, so the same properties are tested with hlat.train. The
table in tests/contract/README.md has all tests of Hydra's suite, with a reason for each omission.

With the local launcher the points run; most tests only print the configuration that they would
read. A fake sbatch assigns job numbers, and manifests are written as without kubectl.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.test_utils import launcher_common_tests as suite
from omegaconf import OmegaConf

from hlat import train
from hlat.config import compose as composition
from hlat.config import hydra_config_security
from hlat.config.config_errors import ConfigError
from hlat.config.package_dirs import find_package_dir
from hlat.jobs.submission import lock_submissions

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LAUNCHERS = {
    "local": [],
    "slurm": [],
    "kubernetes": ["hydra.launcher.image=registry.example/hlat:1"],
    "skypilot": ["hydra.launcher.volumes={/mnt/hlat: shared}"],
}
SBATCH = f"""\
#!{sys.executable}
import pathlib, sys
if "--test-only" not in sys.argv:
    sent = pathlib.Path(__file__).with_name("sent")
    sent.open("a").write(".")
    print(40 + sent.stat().st_size)
"""
Sweep = Callable[..., list[list[JobReturn]]]


def default_on(*defaults: str) -> pytest.MarkDecorator:
    """Parametrize with all launchers, of which those that are not named are slow.

    All launchers compose points with the same code, so one is enough for what Hydra composes.
    """
    launchers = [
        pytest.param(name, marks=[] if name in defaults else [pytest.mark.slow])
        for name in LAUNCHERS
    ]
    return pytest.mark.parametrize("launcher", launchers, indirect=True)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    composition.register_configs()
    suite_package = "pkg://hydra.test_utils/configs"
    allowed = hydra_config_security.HYDRA_PACKAGES | {suite_package}
    monkeypatch.setattr(hydra_config_security, "HYDRA_PACKAGES", allowed)


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(small: list[str]) -> list[str]:
    """Return overrides of a point that prints its data and does not train."""
    return [*small, "data.preview=1"]


@pytest.fixture
def sweep(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Sweep hlat.train in a temporary directory, and return the launcher's results by batch."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(SBATCH)
    (programs / "sbatch").chmod(0o755)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return lambda *overrides: multirun(
        [f"hydra/launcher={launcher}", *LAUNCHERS[launcher]], overrides
    )


def multirun(arguments: list[str], overrides: tuple[str, ...]) -> list[list[JobReturn]]:
    """Run a sweep, with `--config-dir mine` if the directory exists."""
    search_path = create_automatic_config_search_path(
        None, "hlat.train", str(find_package_dir("conf"))
    )
    if Path("mine").is_dir():
        schema = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"file://{Path.cwd()}/mine", schema)
    hydra = Hydra.create_main_hydra2("train", search_path)
    try:
        return hydra.multirun("config", train.main, [*arguments, *overrides], False)
    finally:
        GlobalHydra.instance().clear()


@pytest.mark.parametrize(("launcher_name", "overrides"), LAUNCHERS.items())
class TestUnchanged:
    """Tests of the suite without a task function."""

    test_not_sweeping_hydra_overrides = suite.LauncherTestSuite.test_not_sweeping_hydra_overrides


@pytest.mark.slow_after(2)
def test_one_point(sweep, base, compose):
    ((point,),) = sweep(*base)
    assert point.status is JobStatus.COMPLETED
    assert point.overrides == base
    assert point.cfg == compose(*base, f"run.name={point.cfg.run.name}")
    assert point.task_name == point.hydra_cfg.hydra.job.name == "train"
    assert point.hydra_cfg.hydra.job.num == 0
    assert point.hydra_cfg.hydra.job.id is not None


@default_on("local")
def test_two_points(sweep, base, compose):
    ((first, second),) = sweep(*base, "hydra.sweep.dir=swept", "run.seed=1,2")
    recorded = OmegaConf.load("swept/multirun.yaml").hydra.overrides.task
    assert recorded == [*base, "run.seed=1,2"]
    for i, point in enumerate((first, second)):
        assert point.overrides == [*base, f"run.seed={i + 1}"]
        assert point.cfg == compose(*point.overrides, f"run.name={point.cfg.run.name}")
        assert point.hydra_cfg.hydra.job.num == i
    assert first.hydra_cfg.hydra.job.id != second.hydra_cfg.hydra.job.id
    assert first.working_dir != second.working_dir


def test_an_unknown_key_stops_all_points(sweep, base):
    with pytest.raises(HydraException, match="boo"):
        sweep(*base, "run.seed=1,2", "boo=bar")
    assert not Path("runs").exists()


@default_on("slurm")
def test_two_choices(sweep, base, compose):
    ((first, second),) = sweep(*base, "optimizer=adamw_tiny,adamw_small")
    assert first.overrides == [*base, "optimizer=adamw_tiny"]
    assert second.overrides == [*base, "optimizer=adamw_small"]
    assert first.cfg.optimizer == compose(*base).optimizer
    assert second.cfg.optimizer == compose(*base, "optimizer=adamw_small").optimizer
    assert first.cfg.optimizer != second.cfg.optimizer


@default_on("slurm")
def test_a_mandatory_default_is_swept(sweep, base):
    write("mine/rates/slow.yaml", "lr: 1e-5\n")
    write("mine/rates/fast.yaml", "lr: 1e-2\n")
    write("mine/experiment/open.yaml", "# @package _global_\ndefaults:\n- /rates@optimizer: ???\n")
    ((first, second),) = sweep(*base, "experiment=open", "rates@optimizer=slow,fast")
    assert [first.cfg.optimizer.lr, second.cfg.optimizer.lr] == [1e-5, 1e-2]


@default_on("slurm")
def test_keys_that_only_a_choice_has(sweep, base):
    """Override sources of a corpus, which are keys of its choice and not of the schema."""
    write("mine/data/also.yaml", "defaults: [python]\nsources: {code: {weight: 0.9}}\n")
    ((first, second),) = sweep(*base, "data=python,also", "data.sources.code.text_column=text")
    assert [point.cfg.data.sources.code.weight for point in (first, second)] == [0.5, 0.9]
    assert first.cfg.data.sources.code.text_column == "text"


@default_on("slurm")
def test_job_ids_continue_across_batches(sweep, base):
    batches = sweep(
        *base, "hydra.sweeper.max_batch_size=2", "run.seed=1,2", "optimizer=adamw_tiny,adamw_small"
    )
    assert [len(batch) for batch in batches] == [2, 2]
    points = [point for batch in batches for point in batch]
    assert [point.overrides[-2:] for point in points] == [
        [f"run.seed={seed}", f"optimizer={choice}"]
        for seed in (1, 2)
        for choice in ("adamw_tiny", "adamw_small")
    ]
    assert [point.hydra_cfg.hydra.job.num for point in points] == [0, 1, 2, 3]
    assert len({point.hydra_cfg.hydra.job.id for point in points}) == 4
    assert len({point.working_dir for point in points}) == 4


@default_on("slurm")
def test_the_job_name_does_not_change_the_entry(sweep, base):
    ((point,),) = sweep(*base, "hydra.job.name=other")
    assert point.task_name == point.hydra_cfg.hydra.job.name == "other"
    assert point.status is JobStatus.COMPLETED


@default_on("slurm")
def test_the_sweep_directory_does_not_contain_runs(sweep, base):
    ((point,),) = sweep(
        *base, "hydra.sweep.dir=mine", "hydra.sweep.subdir=${hydra.job.num}", "run.name=x"
    )
    assert Path("mine/multirun.yaml").exists()
    assert point.working_dir == "runs/x"


@pytest.mark.parametrize("launcher", ["local"], indirect=True)
def test_paths_are_relative_to_the_working_directory(sweep, base, corpus):
    Path("texts").symlink_to(corpus)
    ((point,),) = sweep(*base, "data.root=texts", "hydra.job.chdir=true")
    assert point.status is JobStatus.COMPLETED


@default_on("slurm")
def test_values_of_all_types_are_unchanged(sweep, base, corpus):
    names = ["a b", "it's", "c=d,e", 'say "f"']
    more = "+hardware.peak_tflops={fp32:1.5,bf16:3}"
    ((*points,),) = sweep(*base, f"run.name={','.join(map(quote, names))}", more)
    assert [point.cfg.run.name for point in points] == names
    assert points[0].cfg.hardware.peak_tflops == {"fp32": 1.5, "bf16": 3.0}
    odd = Path.cwd() / "a, [1] {b}.arrow"
    odd.write_bytes((corpus / "code.arrow").read_bytes())
    lists = [["code.arrow"], ["code.arrow", str(odd)]]
    ((*points,),) = sweep(*base, f"data.sources.code.paths=[code.arrow],[code.arrow,'{odd}']")
    assert [point.cfg.data.sources.code.paths for point in points] == lists


@pytest.mark.parametrize("launcher", ["slurm"], indirect=True)
def test_one_command_at_a_time_submits_a_run(sweep, base):
    with (
        lock_submissions([Path.cwd() / "runs/x"]),
        pytest.raises(ConfigError, match="runs/x: another command submits its jobs"),
    ):
        sweep(*base, "run.name=x")
    assert not Path("runs/x").exists()
    assert sweep(*base, "run.name=x")


@default_on("slurm")
def test_files_of_a_point_have_its_configuration_and_overrides(sweep, launcher, small, monkeypatch):
    """Check the files of a point; a local run has the number of steps of a variable."""
    name = 'it\'s a, "b"'
    monkeypatch.setenv("HOW_MANY", "2")
    arguments = [
        *small,
        f"run.name={quote(name)}",
        "+hardware.peak_tflops={fp32:1e-3}",
        "run.steps=${oc.env:HOW_MANY}",
    ]
    ((point,),) = sweep(*arguments)
    where = {
        "local": f"runs/{name}",
        "slurm": f"runs/{name}/submissions/1",
        "kubernetes": "runs/sweeps/*/hlat-*",
        "skypilot": "runs/sweeps/*/hlat-*",
    }[launcher]
    (found,) = Path.cwd().glob(where)
    assert OmegaConf.load(found / "config.yaml") == OmegaConf.create(OmegaConf.to_yaml(point.cfg))
    if launcher == "local":
        assert [*OmegaConf.load(found / "overrides.yaml")] == point.overrides
        assert len((found / "metrics.jsonl").read_text().splitlines()) == 2
    else:
        assert json.loads((found / "words.json").read_text())["overrides"] == point.overrides


def test_every_test_of_hydras_suite_is_covered_or_omitted_for_a_reason():
    text = (REPOSITORY / "tests/contract/README.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.(test_\w+)` \| (.*) \|$", text, re.MULTILINE)
    tests = {
        (owner, name)
        for owner, kind in vars(suite).items()
        if inspect.isclass(kind) and kind.__module__ == suite.__name__
        for name in vars(kind)
        if name.startswith("test_")
    }
    assert {(owner, name) for owner, name, _ in rows} == tests
    assert len(rows) == len(tests)
    defined = {name for name in globals() if name.startswith("test_")} | {*vars(TestUnchanged)}
    for _, _, covered_by in rows:
        named = re.findall(r"`(test_\w+)`", covered_by)
        assert {*named} <= defined
        assert named or covered_by.startswith("omitted: ")


@pytest.mark.slow
def test_hydra_finds_the_launchers_in_an_editable_install(tmp_path):
    """Check an editable installation; .ci/wheel checks a wheel."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run_python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.stdout

    if str(REPOSITORY) not in run_python("-c", "import hlat; print(hlat.__file__)"):
        pytest.skip("this checkout is not installed with pip install -e")
    found = run_python("-m", "hlat.train", "--info", "plugins")
    for plugin in ("LocalLauncher", "SlurmLauncher", "KubernetesLauncher", "SkyPilotLauncher"):
        assert len(re.findall(rf"\b{plugin}\b", found)) == 1


def quote(text: str) -> str:
    """Quote a text as a value in the grammar of Hydra."""
    return "'" + text.replace("'", "\\'") + "'"


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "local"], indirect=True)
def test_only_the_local_launcher_stops_points_early(sweep, base):
    with pytest.raises(ConfigError, match=r"study.stop_worse=true needs hydra/launcher=local"):
        sweep(*base, "study.stop_worse=true", "run.seed=1,2")
