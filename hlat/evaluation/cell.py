"""The inside of a sandbox: what a process does to itself before it becomes the program.

This file is run by its path, with Python's own library alone. One process stays outside and says
who is who in the new user namespace; one makes the namespaces; one, the first in its own process
namespace, builds a world of read-only software and one empty folder, gives up everything else and
executes the program. When it ends, the kernel ends all that it left behind.

Sources: user_namespaces(7), pid_namespaces(7), mount_setattr(2), pivot_root(2), prctl(2).
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from typing import Any, NoReturn

CANNOT = 125
"""How a cell ends that could not be made; its output says why."""
HOME = "/home"
_PROGRAM = "import sys; exec(compile(open(int(sys.argv[1])).read(), 'program', 'exec'))"
_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""Users, mounts, processes, network, IPC and host name; of linux/sched.h."""
_USER, _NOBODY = 1000, 65534
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 0x40000, 2
_READ_ONLY, _NO_SUID, _NO_DEVICES = 1, 2, 4
_HERE, _WITH_ALL_BELOW = -100, 0x8000
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "users")]


def main(order: dict[str, Any]) -> None:
    """Become the program.

    Args:
        order: `python`, its interpreter; `source`, the descriptor of its text; `ends`, those that
            it is told of; `isolated`, whether in namespaces; `visible`, the folders that it may
            read; `folder`, its home where it has no other; `limits`, those of sandbox.py.
    """
    _end_with_parent()
    limits = order["limits"]
    if order["isolated"]:
        _enter_namespaces()
        _furnish(order["visible"], limits)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(_USER, _USER, _USER)
            os.setresuid(_USER, _USER, _USER)
        _end_with_parent()
    home = HOME if order["isolated"] else order["folder"]
    os.chdir(home)
    os.umask(0o077)
    for name, value in (
        ("CPU", limits["cpu_seconds"]),
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"]),
        ("NOFILE", limits["num_open_files"]),
        ("NPROC", limits["num_processes"]),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if sys.platform == "linux":
        _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    python = order["python"]
    numbers = [str(number) for number in (order["source"], *order["ends"])]
    arguments = [python, "-I", "-S", "-B", "-c", _PROGRAM, *numbers]
    os.execve(python, arguments, {"HOME": home})  # noqa: S606  there is no shell


def _enter_namespaces() -> None:
    """Go on as the first process of new namespaces; the processes outside wait for it."""
    unshared, mapped = os.pipe(), os.pipe()
    inside = os.fork()
    if inside:
        os.close(unshared[1])
        if os.read(unshared[0], 1):
            _map_users(inside)
            os.write(mapped[1], b"1")
        _wait_for(inside, signal.SIGTERM)
    _check(_libc.unshare(_NAMESPACES), "new namespaces (user_namespaces(7))")
    _end_with_parent()
    os.write(unshared[1], b"1")
    os.read(mapped[0], 1)
    first = os.fork()
    if first:
        _wait_for(first, signal.SIGKILL)
    for end in (*unshared, *mapped):
        os.close(end)


def _map_users(inside: int) -> None:
    """Let the program be a user whom nothing belongs to; one that is root outside stays nobody."""
    root = os.geteuid() == 0
    if not root:
        _write(f"/proc/{inside}/setgroups", "deny")
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        lines = f"0 {own} 1\n{_USER} {_NOBODY} 1" if root else f"{_USER} {own} 1"
        _write(f"/proc/{inside}/{kind}_map", lines)


def _furnish(visible: list[str], limits: dict[str, int]) -> None:
    """Make a new root of what may be read and an empty home, and leave the old one."""
    _write("/proc/sys/user/max_user_namespaces", "0")
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    new = "/tmp"  # noqa: S108  hidden from here on by what is mounted on it, in this process alone
    links = {path: os.readlink(path) for path in visible if os.path.islink(path)}
    here = {p: os.open(p, os.O_PATH) for p in (*visible, *_DEVICES) if p not in links}
    _mount("new", new, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=1m")
    for path, target in links.items():
        os.symlink(target, new + path)
    for path, descriptor in here.items():
        place = new + path
        if path in _DEVICES:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            _write(place, "")
        else:
            os.makedirs(place, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", place, None, _BIND | _RECURSIVE)
        _protect(place, _READ_ONLY | _NO_SUID | (0 if path in _DEVICES else _NO_DEVICES))
        os.close(descriptor)
    os.mkdir(new + HOME)
    options = f"uid={_USER},gid={_USER},mode=700"
    options += f",size={limits['disk_bytes']},nr_inodes={limits['num_files'] + 1}"
    _mount("home", new + HOME, "tmpfs", _NO_SUID | _NO_DEVICES, options)
    os.chdir(new)
    pivot_root = _PIVOT_ROOT.get(platform.machine())
    if pivot_root is None:
        _refuse(f"pivot_root(2) has no number here for a {platform.machine()}")
    _check(_libc.syscall(pivot_root, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "leaving the old root")
    _protect("/", _READ_ONLY, below=False)


def _protect(path: str, attributes: int, below: bool = True) -> None:
    wanted = _Attributes(set=attributes)
    flags, size = _WITH_ALL_BELOW if below else 0, ctypes.sizeof(wanted)
    found = _libc.syscall(
        _MOUNT_SETATTR, _HERE, path.encode(), flags, ctypes.byref(wanted), ctypes.c_size_t(size)
    )
    _check(found, f"mount_setattr of {path}")


def _mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    words = [word.encode() if word is not None else None for word in (kind, options)]
    found = _libc.mount(source.encode(), target.encode(), words[0], ctypes.c_ulong(flags), words[1])
    _check(found, f"mounting {target}")


def _wait_for(child: int, end: signal.Signals) -> NoReturn:
    """End as a child does, and not before; asked to end, let it end.

    The first process of a namespace is gone when all others of it are.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, end))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(found: int, what: str) -> None:
    if found != 0:
        _refuse(f"{what}: {os.strerror(ctypes.get_errno())}")


def _refuse(why: str) -> NoReturn:
    print(why, flush=True)
    os._exit(CANNOT)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        _refuse(str(error))
