"""Copies the program that is running, so that a job runs it as it was when it was sent."""

import shutil
from pathlib import Path

import hlat
from hlat.config.folders import folder
from hlat.tracking import provenance

_BESIDE = ("conf", "sweeps")
"""Without launchers, as a job composes nothing."""
_START = '''\
"""Runs a module of this copy: `python <this folder> hlat.train ...` is `python -m hlat.train ...`
whose modules come from here, and from nowhere else, whatever folder it is started in."""

import runpy
import sys

del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
'''


def copy(target: Path) -> None:
    """Copy the package, and what lies beside it in a checkout, into a new folder."""
    package = Path(hlat.__file__).resolve().parent
    beside = folder("conf").parent
    target.mkdir()
    sources = [package] if beside == package else [package, *map(beside.joinpath, _BESIDE)]
    ignored = shutil.ignore_patterns("__pycache__")
    for source in sources:
        shutil.copytree(source, target / source.name, ignore=ignored)
    (target / "__main__.py").write_text(_START)
    provenance.leave_with(target)
