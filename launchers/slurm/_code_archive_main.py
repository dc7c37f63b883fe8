"""Program of a code archive: `python <archive> hlat.train ...` runs a module of the archive.

Each process extracts the archive to a private directory on the local disk, so that the ranks of its
node import bytecode from it, not sources from the shared file system. The directory is removed at
the end; the next process on the node removes those of killed processes. The program of a job
(hlat.jobs.attempt) runs from the archive itself.
"""

import atexit
import contextlib
import fcntl
import os
import runpy
import shutil
import sys
import tempfile
import time
import zipfile

_PREFIX = "hlat-code-"
_DISKS = ("/tmp", "/dev/shm")  # noqa: S108 (mkdtemp creates private directories)
_MIN_STALE_AGE_S = 600
"""Age from which a directory without a process is removed; a new one is not locked yet."""
_RUN_IN_ARCHIVE = "hlat.jobs.attempt"


def extract(archive: str) -> str:
    """Extract `archive` to a new directory with mode 0700, and return the directory.

    The directory is on a local disk, or next to the archive if no local disk has free space.
    """
    variables = map(os.environ.get, ("SLURM_TMPDIR", "TMPDIR"))
    failures = []
    for root in dict.fromkeys([*filter(None, variables), *_DISKS, os.path.dirname(archive)]):
        try:
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
        except OSError as error:
            failures.append(str(error))
            continue
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                lock_directory(directory)
            with zipfile.ZipFile(archive) as file:
                file.extractall(directory)
        except OSError as error:
            failures.append(f"{directory}: {error}")
            shutil.rmtree(directory, ignore_errors=True)
            continue
        atexit.register(_remove, directory, os.getpid())
        return directory
    sys.exit(f"hlat: cannot extract {archive}: {'; '.join(failures)}")


def lock_directory(directory: str) -> int:
    """Lock a directory for the lifetime of this process; raise OSError if another one has."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_stale_directories(root: str) -> None:
    """Remove directories of this user's processes that were killed."""
    for entry in os.scandir(root):
        try:
            status = entry.stat(follow_symlinks=False)
            is_old = time.time() - status.st_mtime > _MIN_STALE_AGE_S
            if entry.name.startswith(_PREFIX) and status.st_uid == os.getuid() and is_old:
                descriptor = lock_directory(entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(descriptor)
        except OSError:  # in use, or removed by another process
            continue


def _remove(directory: str, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked process
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Run the module of the first argument."""
    del sys.argv[0]
    if os.path.isfile(sys.path[0]) and sys.argv[0] != _RUN_IN_ARCHIVE:
        archive = os.path.abspath(sys.path[0])
        sys.path[0] = extract(archive)
        if (root := os.path.dirname(sys.path[0])) != os.path.dirname(archive):
            remove_stale_directories(root)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
