"""A job runs the program as it was, in whatever folder it is started."""

import json
import subprocess
import sys

from hlat.config import compose as composition
from hlat.tracking import provenance

composition.register_configs()
from hydra_plugins.hlat_launchers.slurm._code_snapshot import copy_code  # noqa: E402 (known from now)


def test_a_copy_runs_its_own_modules_composes_and_knows_its_revision(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_run_git", lambda *words: f"git {words[0]}")
    copy_code(tmp_path / "code")
    (tmp_path / "hlat").mkdir()
    (tmp_path / "hlat/__init__.py").write_text("raise SystemExit('the checkout, later')")
    told = "import json, hlat.config.package_dirs as f, hlat.tracking.provenance as p\\n"
    told += "from hlat.config.compose import compose_config\\n"
    told += "tp = compose_config(['parallelism.tp=2']).parallelism.tp\\n"
    told += "print(json.dumps([str(f.find_code_snapshot()), str(f.find_package_dir('conf')), p.get_git_revision(), tp]))"
    (tmp_path / "code/hlat/told.py").write_text(told.replace("\\n", "\n"))
    words = [sys.executable, str(tmp_path / "code"), "hlat.told"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    code = str(tmp_path / "code")
    assert json.loads(done.stdout) == [code, f"{code}/conf", "git rev-parse", 2], done.stderr
    trains = [sys.executable, code, "hlat.train", "--frozen", "nowhere"]
    done = subprocess.run(trains, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hlat: --frozen nowhere: ")
