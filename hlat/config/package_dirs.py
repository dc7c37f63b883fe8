"""Locations of the resource directories and the code snapshot, in a checkout and in a wheel."""

from pathlib import Path

_PACKAGE_DIR = Path(__file__).resolve().parent.parent


def find_package_dir(name: str) -> Path:
    """Return conf/, sweeps/ or campaigns/: in the installed package, or next to it in a checkout.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    for path in (_PACKAGE_DIR / name, _PACKAGE_DIR.parent / name):
        if path.is_dir():
            return path
    raise FileNotFoundError(f"{name}/ is neither in {_PACKAGE_DIR} nor next to it; reinstall hlat")


def list_choices(group: str) -> list[str]:
    """Return the sorted choices of a configuration group; none if the group does not exist."""
    directory = find_package_dir("sweeps") if group == "sweep" else find_package_dir("conf") / group
    return sorted(file.stem for file in directory.glob("*.yaml"))


def find_code_snapshot() -> Path | None:
    """Return the code snapshot of a submitted job, or None if the code is not from a snapshot."""
    parent = _PACKAGE_DIR.parent
    return parent if (parent / "__main__.py").is_file() else None
