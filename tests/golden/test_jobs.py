"""What jobs of the presets are: the variables of every kind of node, and the script that sbatch is
given."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config import compose as composition
from hlat.config.folders import folder
from hlat.jobs.evaluation import Evaluation
from hlat.jobs.submission import Place

composition.register()
from hydra_plugins.hlat_launchers._job import (  # noqa: E402 (known from now)
    KINDS,
    environment,
    evaluation_job,
    job,
)
from hydra_plugins.hlat_launchers._sbatch import (  # noqa: E402
    SlurmLauncherConfig,
    parameters,
    script,
)

GOLDEN = Path(__file__).parent / "jobs"
SDK = {"trn1_32xl": "neuron_2_28", "trn1n_32xl": "neuron_2_31", "trn2_48xl": "neuron_2_33"}
SDK["trn3"] = "neuron_2_33"
HOME = Path("/fsx/home")
EXPERIMENTS = sorted(file.stem for file in (folder("conf") / "experiment").glob("*.yaml"))
HARDWARE = sorted(file.stem for file in (folder("conf") / "hardware").glob("*.yaml"))


def _config(compose, *overrides: str):
    """What is composed, also where this version has no engine that could execute it."""
    return OmegaConf.to_object(compose(*overrides))


@pytest.mark.parametrize("hardware", HARDWARE)
def test_environment_is_as_recorded(hardware, compose, pytestconfig):
    config = _config(compose, f"hardware={hardware}", f"compiler={SDK.get(hardware, 'none')}")
    now = json.dumps(environment(config), indent=2, sort_keys=True) + "\n"
    file = GOLDEN / f"{hardware}.json"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{hardware} changed; if meant: pytest tests/golden --update"


@pytest.mark.parametrize(
    "preset", [*(f"hardware={h}" for h in HARDWARE), *(f"experiment={e}" for e in EXPERIMENTS)]
)
def test_script_is_as_recorded(preset, compose, pytestconfig):
    config = _config(compose, preset)
    name = preset.partition("=")[2]
    config.run.name = name
    place = Place(HOME / f"runs/{name}/submissions/1")
    told = parameters(job(config, (), HOME), SlurmLauncherConfig(), place.log("%j"), HOME)
    now = script(told, place, ["/opt/venv/bin/python", str(place.code)])
    file = GOLDEN / f"{preset.replace('=', '_')}.sh"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{preset} changed; if meant: pytest tests/golden --update"


def test_script_of_an_evaluation_is_as_recorded(compose, pytestconfig):
    config = _config(compose, "run.name=evaluations", "hardware=h100_p5", "parallelism.tp=8")
    words = ("runs/hlat_7b", "tasks=hlat_table2", "follow=true")
    asked = Evaluation("hlat_table2-1a2b3c4d", words[0], Path(words[0]), words, config)
    place = Place(HOME / asked.folder / "submissions/1")
    made = evaluation_job(asked, words, HOME)
    told = parameters(made, SlurmLauncherConfig(time="1-0"), place.log("%j"), HOME)
    now = script(told, place, ["/opt/venv/bin/python", str(place.code)])
    file = GOLDEN / "evaluation.sh"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), "it changed; if meant: pytest tests/golden --update"


def test_every_record_belongs_to_a_preset():
    scripts = {file.name for file in GOLDEN.glob("*.sh")}
    presets = {
        *(f"hardware_{h}.sh" for h in HARDWARE),
        *(f"experiment_{e}.sh" for e in EXPERIMENTS),
        "evaluation.sh",
    }
    assert scripts == presets


def test_every_record_belongs_to_a_kind_of_node():
    assert [file.stem for file in sorted(GOLDEN.glob("*.json"))] == HARDWARE


def test_kinds_agree_with_the_presets(compose):
    presets = {hardware: compose(f"hardware={hardware}").hardware for hardware in HARDWARE}
    assert KINDS.keys() <= {preset.name for preset in presets.values()}
    for preset in presets.values():
        if kind := KINDS.get(preset.name):
            assert preset.processes_per_node % kind.chips == 0
            assert preset.network_gbit_per_s % kind.efa == 0


def test_what_the_configuration_sets_goes_first(compose):
    mine = ["hardware=trn1_32xl", "compiler=neuron_2_28", "compiler.environment.FI_PROVIDER=tcp"]
    assert environment(_config(compose, *mine))["FI_PROVIDER"] == "tcp"


def test_the_papers_job(compose, tmp_path):
    config = _config(compose, "experiment=hlat_70b")
    made = job(config, ("python", "-m", "hlat.train"), tmp_path)
    assert (made.nodes, made.processes_per_node, made.neuron_sdk) == (256, 32, "2.28")
    assert made.run_folder == tmp_path / "runs/hlat_70b"


def test_this_machine_runs_what_the_layout_asks_for(compose, tmp_path):
    made = job(_config(compose, "run.name=x", "parallelism.tp=2"), ("python",), tmp_path)
    assert (made.nodes, made.processes_per_node, made.kind) == (1, 2, None)
