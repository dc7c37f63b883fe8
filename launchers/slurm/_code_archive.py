"""Archive of the running code, so that later changes do not affect a submitted job."""

import hashlib
import importlib.util
import io
import marshal
import zipfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import hlat
from hlat.config.package_dirs import find_package_dir
from hlat.storage.durable_files import replace_file
from hlat.tracking import provenance

from . import _code_archive_main

_RESOURCE_DIRS = ("conf", "sweeps")
"""Directories next to the package; launchers are left out, as a job submits no jobs."""
_UNCHECKED_HASH = 1
"""Flag of bytecode that is valid without a comparison with its source (PEP 552)."""
_MODE, _TIME = 0o644 << 16, (1980, 1, 1, 0, 0, 0)
"""Attributes of all files in an archive."""


class CodeArchive:
    """Content of an archive: the package, its resource directories, and the revision.

    `python <archive> hlat.train ...` is equivalent to `python -m hlat.train ...` with all modules
    from the archive. Each process extracts it to the local disk of its node (_code_archive_main).
    """

    def __init__(self) -> None:
        self._files = {name: path.read_bytes() for name, path in _find_files()}
        self._files["__main__.py"] = Path(_code_archive_main.__file__).read_bytes()
        self._files[provenance.REVISION_FILE] = provenance.format_revision().encode()
        digest = hashlib.sha256()
        for name, content in self._files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.name = f"code-{digest.hexdigest()[:12]}.zip"

    def write(self, path: Path) -> None:
        """Write the archive with the bytecode of this Python version."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
            for name, content in (self._files | self._compile()).items():
                info = zipfile.ZipInfo(name, _TIME)
                info.external_attr, info.compress_type = _MODE, zipfile.ZIP_DEFLATED
                archive.writestr(info, content)
        replace_file(path, buffer.getvalue())

    def _compile(self) -> dict[str, bytes]:
        """Return the bytecode files; the interpreter has most of them in its cache."""
        bytecode = {}
        for name, path in _find_files():
            if path.suffix != ".py":
                continue
            module = name.removesuffix(".py").replace("/", ".")
            code = SourceFileLoader(module, str(path)).get_code(module)
            header = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little")
            source_hash = importlib.util.source_hash(self._files[name])
            file = importlib.util.cache_from_source(name)
            bytecode[file] = header + source_hash + marshal.dumps(code)
        return bytecode


def _find_files() -> Iterator[tuple[str, Path]]:
    """Yield the name in the archive and the path of each file."""
    package = Path(hlat.__file__).resolve().parent
    parent = find_package_dir("conf").parent
    directories = [package]
    if parent != package:
        directories += map(parent.joinpath, _RESOURCE_DIRS)
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(directory.parent).as_posix(), path
