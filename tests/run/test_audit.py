"""Every path by which hlat loads data, under an audit hook that no process can remove.

audited/sitecustomize.py monitors all Python processes of a run: trainer, ranks, data workers. It
ensures that none of them

* unpickles references to classes or functions (as torch.load and object arrays of numpy would),
  except from pipes between processes of one program;
* compiles or runs code, except that of installed files as they are imported, and code that a short
  list of libraries compose;
* starts a shell, or any program but git, uname and this Python;
* loads code with marshal outside of the import system, or a shared library from a directory without
  installed packages;
* looks up classes for YAML;
* opens a socket to another machine, or looks up the name of one.

It does not see calls of C++ code: the sockets of gloo and of torch's TCPStore, and files that
native libraries parse.
"""

import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hlat.data.tokenizer import EMBEDDED_FILE

REPOSITORY = Path(__file__).resolve().parent.parent.parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def audited(tmp_path: Path, compose: object) -> Run:
    """Run Python in a separate folder under the audit hook."""
    import hydra_plugins.hlat_launchers

    paths = [Path(__file__).with_name("audited"), REPOSITORY]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HLAT_AUDIT": str(tmp_path / "audit"),
        "HLAT_AUDIT_LAUNCHERS": next(iter(hydra_plugins.hlat_launchers.__path__)),
    }

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


def seen(folder: Path) -> str:
    file = folder / "audit"
    return file.read_text() if file.exists() else ""


ONE_PROCESS = """
import shlex, sys
from hlat import export, train
from hlat.config import entry_point
from hlat.prepare import __main__ as prepare
from hlat.report import __main__ as report

def run(name, *words):
    sys.argv = ["hlat." + name, *words]
    mains = {"export": export.main, "report": report.main, "prepare": prepare.main}
    code = mains[name](words) if name in mains else entry_point.run_entry_point(train.main)
    assert not code, (name, words, code)

for line in open("commands").read().splitlines():
    run(*shlex.split(line))
"""


def list_commands(small: list[str], corpus: Path, dp: int) -> list[list[str]]:
    """Return commands that load every kind of file."""
    run = [*small, "run.name=x", "data.workers=1"]
    layout = [f"parallelism.dp={dp}", f"parallelism.zero={dp - 1}"]
    start = ["run.steps=1", "model.init_from=exported", f"data.tokenizer={EMBEDDED_FILE}"]
    return [
        ["train", *run, "run.steps=5", *layout],
        ["train", *run, "run.steps=6"],
        ["export", "runs/x", "--output", "exported"],
        ["train", *small, "run.name=z", *start],
        ["report", "runs/x"],
        ["prepare", f"{corpus}/prose.arrow", "--output", "prepared", "--workers", "2"],
        ["prepare", "--verify", "prepared"],
    ]


@pytest.mark.slow
def test_run_no_loaded_code(audited: Run, tmp_path: Path, small: list[str], corpus: Path) -> None:
    """Run the commands in one process, which is faster, and a data worker in another."""
    lines = [shlex.join(command) for command in list_commands(small, corpus, dp=1)]
    (tmp_path / "commands").write_text("\n".join(lines))
    done = audited("-c", ONE_PROCESS)
    assert not seen(tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(set((tmp_path / "audit.processes").read_text().split())) >= 1 + 2


@pytest.mark.slow
def test_run_no_loaded_code_in_several_processes(
    audited: Run, tmp_path: Path, small: list[str], corpus: Path
) -> None:
    for name, *arguments in list_commands(small, corpus, dp=2):
        done = audited("-m", f"hlat.{name}", *arguments)
        assert not seen(tmp_path)
        assert done.returncode == 0, done.stderr
    processes = (tmp_path / "audit.processes").read_text().split()
    # Six commands, two ranks, and a data worker of each trainer
    assert len(set(processes)) >= 6 + 2 + 4


class Payload:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.getenv, ("HOME",)


FORBIDDEN = {
    "pickle": ("import pickle; pickle.load(open('p', 'rb'))", "pickle.find_class"),
    "Python's own pickle": ("import pickle; pickle._load(open('p', 'rb'))", "pickle.find_class"),
    "numpy": ("import numpy; numpy.load('a.npy', allow_pickle=True)", "pickle.find_class"),
    "torch": ("import torch; torch.load('t', weights_only=False)", "pickle.find_class"),
    "exec": ("exec(open('code.py').read())", "compile"),
    "eval": ("eval(open('code.py').read())", "compile"),
    "compile": ("compile(open('code.py').read(), 'code.py', 'exec')", "compile"),
    "runpy": ("import runpy; runpy.run_path('code.py')", "compile"),
    "a module beside the data": ("import sys; sys.path.insert(0, '.'); import code1", "compile"),
    "marshal": ("import marshal; marshal.loads(marshal.dumps(1))", "marshal.loads"),
    "a shell": ("import os; os.system('true')", "os.system"),
    "shell=True": ("import subprocess; subprocess.run('true', shell=True)", "subprocess.Popen"),
    "another program": ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
    "a shared library": ("import ctypes; ctypes.CDLL('./x.so')", "ctypes.dlopen"),
    "yaml": ("import yaml; yaml.unsafe_load('!!python/name:os.getcwd')", "yaml"),
    "yaml's full loader": ("import yaml; yaml.full_load('!!python/name:os.getcwd')", "yaml"),
    "another machine": (
        "import socket; socket.socket().connect(('192.0.2.1', 9))",
        "socket.connect",
    ),
    "its name": ("import socket; socket.getaddrinfo('example.com', 9)", "socket.getaddrinfo"),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_detect_forbidden_events(audited: Run, tmp_path: Path, case: str) -> None:
    (tmp_path / "p").write_bytes(pickle.dumps(Payload()))
    np.save(tmp_path / "a.npy", np.array([Payload()], object), allow_pickle=True)
    torch.save(Payload(), tmp_path / "t")
    for name in ("code.py", "code1.py"):
        (tmp_path / name).write_text("1\n")
    program, event = FORBIDDEN[case]
    done = audited("-c", f"def act():\n    {program}\nact()")
    assert done.returncode == 1, done.stderr
    assert "ForbiddenError" in done.stderr
    assert seen(tmp_path).startswith(event)
