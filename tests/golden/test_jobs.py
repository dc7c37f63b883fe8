"""Jobs of the presets: environment variables of every node type, and sbatch scripts."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config import compose as composition
from hlat.config.command_job import CommandJob
from hlat.config.package_dirs import find_package_dir
from hlat.jobs.submission import SubmissionDir

composition.register_configs()
from hydra_plugins.hlat_launchers._job_spec import (  # noqa: E402 (registered above)
    NODE_TYPES,
    build_command_job,
    build_job,
    build_job_environment,
)
from hydra_plugins.hlat_launchers.slurm._sbatch_script import (  # noqa: E402 (registered above)
    SlurmLauncherConfig,
    build_command,
    build_sbatch_parameters,
    build_sbatch_script,
)

GOLDEN = Path(__file__).parent / "jobs"
SDK = {"trn1_32xl": "neuron_2_28", "trn1n_32xl": "neuron_2_31", "trn2_48xl": "neuron_2_33"}
SDK["trn3"] = "neuron_2_33"
HOME = Path("/fsx/home")
PROGRAM = ["/opt/venv/bin/python", "/fsx/home/code.zip"]
EXPERIMENTS = sorted(file.stem for file in (find_package_dir("conf") / "experiment").glob("*.yaml"))
HARDWARE = sorted(file.stem for file in (find_package_dir("conf") / "hardware").glob("*.yaml"))


def _config(compose, *overrides: str):
    """Compose a configuration, also if no engine of this version can execute it."""
    return OmegaConf.to_object(compose(*overrides))


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.slow_after(6)
def test_environment_is_as_recorded(hardware, compose, pytestconfig):
    config = _config(compose, f"hardware={hardware}", f"compiler={SDK.get(hardware, 'none')}")
    now = json.dumps(build_job_environment(config), indent=2, sort_keys=True) + "\n"
    file = GOLDEN / f"{hardware}.json"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{hardware} changed; if meant: pytest tests/golden --update"


@pytest.mark.parametrize(
    "preset", [*(f"hardware={h}" for h in HARDWARE), *(f"experiment={e}" for e in EXPERIMENTS)]
)
@pytest.mark.slow_after(6)
def test_script_is_as_recorded(preset, compose, pytestconfig):
    config = _config(compose, preset)
    name = preset.partition("=")[2]
    config.run.name = name
    submission = SubmissionDir(HOME / f"runs/{name}/submissions/1")
    parameters = build_sbatch_parameters(
        build_job(config, (), HOME), SlurmLauncherConfig(), submission.build_log_path("%j"), HOME
    )
    now = build_sbatch_script(parameters, submission.path, build_command(PROGRAM, submission.path))
    file = GOLDEN / f"{preset.replace('=', '_')}.sh"
    if pytestconfig.getoption("--update"):
        file.write_text(now)
    assert now == file.read_text(), f"{preset} changed; if meant: pytest tests/golden --update"


def test_script_of_an_evaluation_is_as_recorded(compose, pytestconfig):
    config = _config(compose, "run.name=evaluations", "hardware=h100_p5", "parallelism.tp=8")
    arguments = ("runs/hlat_7b", "tasks=hlat_table2", "follow=true")
    name = "hlat_table2-1a2b3c4d"
    job_dir = Path(arguments[0], "evaluations", name)
    command_job = CommandJob("evaluate", name, arguments[0], job_dir, arguments, config)
    submission = SubmissionDir(HOME / command_job.job_dir / "submissions/1")
    made = build_command_job(command_job, arguments, HOME)
    parameters = build_sbatch_parameters(
        made, SlurmLauncherConfig(time="1-0"), submission.build_log_path("%j"), HOME
    )
    now = build_sbatch_script(parameters, submission.path, build_command(PROGRAM, submission.path))
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


def test_every_record_belongs_to_a_node_type():
    assert [file.stem for file in sorted(GOLDEN.glob("*.json"))] == HARDWARE


@pytest.mark.slow
def test_node_types_agree_with_the_presets(compose):
    presets = {hardware: compose(f"hardware={hardware}").hardware for hardware in HARDWARE}
    assert NODE_TYPES.keys() <= {preset.name for preset in presets.values()}
    for preset in presets.values():
        if kind := NODE_TYPES.get(preset.name):
            assert preset.processes_per_node % kind.num_chips == 0
            assert preset.network_gbit_per_s % kind.num_efa_interfaces == 0


def test_variables_of_the_configuration_have_precedence(compose):
    given = ["hardware=trn1_32xl", "compiler=neuron_2_28", "compiler.environment.FI_PROVIDER=tcp"]
    assert build_job_environment(_config(compose, *given))["FI_PROVIDER"] == "tcp"


def test_the_papers_job(compose, tmp_path):
    config = _config(compose, "experiment=hlat_70b")
    made = build_job(config, ("python", "-m", "hlat.train"), tmp_path)
    assert made.num_nodes == 256
    assert made.run_dir == tmp_path / "runs/hlat_70b"


def test_a_local_job_has_no_node_type(compose, tmp_path):
    made = build_job(_config(compose, "run.name=x", "parallelism.tp=2"), ("python",), tmp_path)
    assert (made.num_nodes, made.node_type) == (1, None)
