"""Runs as Kubernetes jobs: all manifests are validated first, and the commands of pods train.

There is no cluster: a fake kubectl records its arguments, and the commands of pods run as processes
of this machine, with the variables that Kubernetes sets.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hlat.config.compose import import_launcher_module
from hlat.config.override_keys import merge_overrides

IMAGE = "hydra.launcher.image=registry.example/hlat:1"
SEND = ("hydra/launcher=kubernetes", IMAGE)
KUBECTL = """\
#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$*" in *"$(cat "$(dirname "$0")/refused")"*) echo "error: no" >&2; exit 1;; esac
"""


class Kubectl:
    """Fake kubectl that records its calls and rejects those with a given text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kubectl").write_text(KUBECTL)
        (folder / "kubectl").chmod(0o755)
        self.reject("nothing at all")

    def reject(self, argument: str) -> None:
        (self.folder / "refused").write_text(argument)

    def calls(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def kubectl(tmp_path_factory, monkeypatch) -> Kubectl:
    folder = tmp_path_factory.mktemp("programs")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Kubectl(folder)


def manifests(runner) -> list[Path]:
    return sorted((runner.folder / "runs/sweeps").rglob("manifest.yaml"))


def documents(file: Path) -> tuple[dict, dict]:
    configuration, work = yaml.safe_load_all(file.read_text())
    return configuration, work


@pytest.mark.slow  # one or more whole processes
def test_validate_all_points_before_creating_one(runner, kubectl):
    done = runner.run("-m", *SEND, "run.name=a,b")
    assert done.returncode == 0, done.stderr
    first, second = (str(file.relative_to(runner.folder)) for file in manifests(runner))
    assert kubectl.calls() == [
        f"create --dry-run=server -f {first} -f {second}",
        f"create -f {first}",
        f"create -f {second}",
    ]
    assert "[1] JobSet hlat-b trains /fsx/runs/b\n    log:     kubectl logs" in done.stdout
    assert not (runner.folder / "runs/a").exists()


def test_submit_a_single_run(runner, kubectl):
    done = runner.run(*SEND, "run.name=a")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in kubectl.calls()] == ["--dry-run=server", "-f"]


@pytest.mark.slow
def test_print_the_manifest_in_a_dry_run(runner, kubectl):
    done = runner.run(*SEND, "run.name=a", "hydra.launcher.dry_run=true")
    assert done.returncode == 0, done.stderr
    assert kubectl.calls() == []
    (file,) = manifests(runner)
    assert file.read_text() in done.stdout
    assert f"create it with:  kubectl create -f {file.relative_to(runner.folder)}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("hydra.launcher.image=null",), "hydra.launcher.image is not set; name an image"),
        (("hydra.launcher.mount=fsx",), "hydra.launcher.mount=fsx is not an absolute path"),
        (("hydra.launcher.max_attempts=0",), "hydra.launcher.max_attempts=0 is too small"),
        (("+hydra.launcher.pod.volumes=[]",), "hydra.launcher.pod.volumes is set by the launcher"),
        (("hydra.launcher.env={A: null}",), "hydra.launcher.env"),
        (("hydra.launcher.cpus=0",), "hydra.launcher.cpus=0 is too small"),
        (
            ("compiler=neuron_2_28", "hydra.launcher.env.NEURON_RT_STOCHASTIC_ROUNDING_EN=1"),
            "hydra.launcher.env.NEURON_RT_STOCHASTIC_ROUNDING_EN would override a variable",
        ),
        (("optimizer.lr=1e-3,no",), "optimizer.lr"),
        (("run.name=same", "run.seed=1,2"), "run.name=same run.seed=1]; omit run.name"),
    ],
)
@pytest.mark.slow_after(4)
def test_refuse_an_invalid_point_or_setting(arguments, problem, runner, kubectl):
    done = runner.run("-m", *merge_overrides(SEND, arguments))
    assert done.returncode == 2, done.stdout
    assert problem in done.stderr
    assert kubectl.calls() == []


@pytest.mark.slow
def test_refuse_a_literal_secret_without_writing_it(runner, kubectl):
    settings = ("hydra.launcher.env={HF_TOKEN: canary-1}", "hydra.launcher.secret_env.A=canary-2")
    for flags in ((), ("-m",)):
        done = runner.run(*flags, *SEND, *settings)
        assert done.returncode == 2, done.stdout
        assert "set hydra.launcher.secret_env.HF_TOKEN=SECRET/KEY" in done.stderr
        assert "hydra.launcher.secret_env.A is not of the form SECRET/KEY" in done.stderr
        assert "canary" not in done.stdout + done.stderr
    files = [file for file in runner.folder.rglob("*") if file.is_file()]
    assert not any(b"canary" in file.read_bytes() for file in files)
    assert kubectl.calls() == []


@pytest.mark.slow
def test_create_nothing_when_the_cluster_refuses(runner, kubectl):
    kubectl.reject("--dry-run=server")
    done = runner.run("-m", *SEND, "run.name=a,b")
    assert done.returncode == 2
    assert "hlat: kubectl create: error: no" in done.stderr
    assert len(kubectl.calls()) == 1


@pytest.mark.slow
def test_write_manifests_without_kubectl(runner, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    done = runner.run("-m", *SEND, "run.name=a,b", "hydra.launcher.kind=PyTorchJob")
    assert done.returncode == 0, done.stderr
    assert [documents(file)[1]["kind"] for file in manifests(runner)] == ["PyTorchJob"] * 2
    assert "create it with:  kubectl create -f runs/sweeps/" in done.stdout


@pytest.mark.slow
def test_escape_values_of_the_user(runner, kubectl):
    variable = "+compiler.environment.NEURON_X='$(HOME) $HOME \"a\" : # - {b}'"
    done = runner.run(
        *SEND, "run.name=a", variable, "compiler.neuron_sdk='2.28'", "run.root='x $(y)'"
    )
    assert done.returncode == 0, done.stderr
    (file,) = runner.folder.rglob("manifest.yaml")
    _, work = documents(file)
    pod = work["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (
        substitute_variables(values["NEURON_X"], {"HOME": "bad"}) == '$(HOME) $HOME "a" : # - {b}'
    )
    assert "bad" not in " ".join(
        substitute_variables(argument, {"y": "bad"}) for argument in container["command"]
    )


@pytest.mark.slow  # one or more whole processes
def test_add_fields_to_pods(runner, kubectl):
    tolerations = "+hydra.launcher.pod.tolerations=[{operator: Exists}]"
    assert runner.run(*SEND, "run.name=a", tolerations).returncode == 0
    _, work = documents(manifests(runner)[0])
    pod = work["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]


@pytest.mark.slow  # one or more whole processes
def test_set_dictionaries_with_and_without_a_plus(runner, kubectl):
    settings = (
        "hydra.launcher.env={NCCL_DEBUG: INFO}",
        "+hydra.launcher.env.OMP_NUM_THREADS=4",
        "hydra.launcher.secret_env.WANDB_API_KEY=wandb/api-key",
        "hydra.launcher.labels={example.com/team: nlp}",
        "hydra.launcher.exclude=[trn-7]",
        "hydra.launcher.scheduler_name=gang",
    )
    done = runner.run(*SEND, "run.name=a", *settings)
    assert done.returncode == 0, done.stderr
    _, group, work = yaml.safe_load_all(manifests(runner)[0].read_text())
    assert group["kind"] == "PodGroup"
    assert work["metadata"]["labels"]["example.com/team"] == "nlp"
    pod = work["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert "trn-7" in json.dumps(pod["affinity"])
    env = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert env["NCCL_DEBUG"]["value"] == "INFO"
    assert env["OMP_NUM_THREADS"]["value"] == "4"
    reference = {"name": "wandb", "key": "api-key"}
    assert env["WANDB_API_KEY"]["valueFrom"] == {"secretKeyRef": reference}


@pytest.mark.parametrize("run", ["a", "a_b", "a-b", "A-b", "x" * 200, "x" * 201, "ä", "1.5"])
def test_object_names_are_unique_labels(run):
    name_of = import_launcher_module("kubernetes._kubernetes_manifest").build_object_name
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,39}[a-z0-9])?", name_of(run))
    others = {"a", "a_b", "a-b", "A-b", "x" * 200, "x" * 201, "ä", "1.5"} - {run}
    assert name_of(run) not in map(name_of, others)


def substitute_variables(text: str, variables: dict[str, str]) -> str:
    """Substitute variables like Kubernetes: $(NAME) by its value, $$ by $."""

    def replace(match: "re.Match[str]") -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\((\w+)\)", replace, text)


@pytest.mark.parametrize(
    ("kind", "index", "nodes"),
    [
        ("JobSet", "JOB_COMPLETION_INDEX", 1),
        ("JobSet", "JOB_COMPLETION_INDEX", 2),
        ("PyTorchJob", "RANK", 2),
    ],
)
@pytest.mark.slow  # trains with the commands of the manifests, which tests/golden records
def test_pods_train_together(kind, index, nodes, runner, kubectl, tmp_path):
    layout = (f"parallelism.tp={nodes}", f"hardware.nodes={nodes}", "run.steps=3")
    layout += ("hardware.processes_per_node=1",)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = runner.run(*SEND, "run.name=a", *layout, f"hydra.launcher.kind={kind}")
    assert done.returncode == 0, done.stderr
    (file,) = manifests(runner)
    configuration, work = documents(file)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for name, text in configuration["data"].items():
        (mounted / name).write_text(text)
    text = json.dumps(work["spec"])
    command = json.loads(re.search(r'"command": (\[.*?\])', text)[1])
    pods = []
    for i in range(nodes):
        arguments = [substitute_variables(argument, {index: str(i)}) for argument in command]
        arguments = [
            str(mounted) if argument == "/etc/hlat" else argument for argument in arguments
        ]
        arguments = [sys.executable if argument == "python" else argument for argument in arguments]
        arguments = [
            re.sub("^HLAT_RDZV_ENDPOINT=.*", f"HLAT_RDZV_ENDPOINT=127.0.0.1:{port}", argument)
            for argument in arguments
        ]
        operator = {
            "RANK": str(i),
            "WORLD_SIZE": str(nodes),
            "MASTER_ADDR": "x",
            "MASTER_PORT": "1",
        }
        pods.append(
            subprocess.Popen(
                arguments,
                cwd=runner.folder,
                env=runner.environment | (operator if kind == "PyTorchJob" else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    output = [pod.communicate(timeout=600)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * nodes, "\n".join(output)
    assert [row["step"] for row in runner.rows("a", "metrics.jsonl")] == [1, 2, 3]
