"""Copy of the running code, so that later changes do not affect a submitted job."""

import shutil
from pathlib import Path

import hlat
from hlat.config.package_dirs import find_package_dir
from hlat.tracking import provenance

_RESOURCE_DIRS = ("conf", "sweeps")
"""Directories next to the package; launchers are left out, as a job submits no jobs."""
_MAIN_MODULE = '''\
"""Runs a module of this code snapshot: `python <this directory> hlat.train ...` is equivalent to
`python -m hlat.train ...` with all modules imported from here, in any working directory."""

import runpy
import sys

del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
'''


def copy_code(target: Path) -> None:
    """Copy the package and its resource directories to a new directory."""
    package = Path(hlat.__file__).resolve().parent
    parent = find_package_dir("conf").parent
    target.mkdir()
    sources = [package] if parent == package else [package, *map(parent.joinpath, _RESOURCE_DIRS)]
    for source in sources:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target / source.name, ignore=ignore)
    (target / "__main__.py").write_text(_MAIN_MODULE)
    provenance.write_revision_file(target)
