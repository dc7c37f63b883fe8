"""Build backend: that of setuptools, with the checkout on the path of an editable install.

In a directory that contains a checkout named `hlat`, Python finds that directory before it calls
the import hook of setuptools, and takes it for a namespace package. A package on `sys.path` has
precedence over both.
"""

import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

CHECKOUT = Path(__file__).resolve().parent.parent


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the editable wheel, and add a .pth file with the path of the checkout."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    with zipfile.ZipFile(Path(wheel_directory) / name, "a") as wheel:
        wheel.writestr("hlat_checkout.pth", f"{CHECKOUT}\n")
    return str(name)
