"""Where the folders beside the package lie, in a checkout and in an installed wheel alike."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def folder(name: str) -> Path:
    """Return conf/ or sweeps/: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: Neither place has it: the installation is broken.
    """
    for place in (_PACKAGE / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{name}/ is neither in {_PACKAGE} nor beside it; reinstall hlat")


def copy() -> Path | None:
    """Return the folder of the copy that a job runs, which starts by itself; None: it is none."""
    beside = _PACKAGE.parent
    return beside if (beside / "__main__.py").is_file() else None
