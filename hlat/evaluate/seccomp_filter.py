"""Seccomp filter of generated programs, and the script that starts a program in a new keyring.

`python seccomp_filter.py isolated|weak COMMAND...` executes the command with a new, anonymous
session keyring. bwrap applies the filter itself (`--seccomp`); `weak` applies it to the command.
The script runs without hlat, so that this file imports only the standard library.

Sources: the structures of linux/filter.h and linux/seccomp.h, the system call numbers of
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h in Linux 6.12.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys

_DENIED = {
    # keyrings(7): keys of the user, such as credentials of file systems
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # sysvipc(7), mq_overview(7), memfd_create(2): memory without a resource limit
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # memory and files of other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # io_uring(7) creates sockets without the system call; the others are for root and debuggers
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
"""Denied system calls, with their numbers on x86_64 and aarch64."""
_SOCKET_CALLS = {"socket": (41, 198), "socketpair": (53, 199)}
_ALLOWED_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6, which a network namespace isolates."""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH constants of linux/audit.h, in the order of the numbers above."""
_X32_BIT = 0x40000000
"""Bit of system calls of the x32 ABI, which have the same architecture as x86_64."""

_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
_KEYCTL_JOIN_SESSION_KEYRING = 1


def is_supported_machine() -> bool:
    """Return True if the filter is available on this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def build_filter() -> bytes:
    """Return the filter of this machine, a program of classic BPF.

    Denied calls fail with EPERM. A call of another ABI, which has other numbers, kills the process.
    """
    column = [*_MACHINES].index(platform.machine())
    sockets = [numbers[column] for numbers in _SOCKET_CALLS.values()]
    program = [
        _encode(_LOAD_WORD, _ARCHITECTURE_OFFSET),
        *_return_unless_equal(_MACHINES[platform.machine()], _KILL),
        _encode(_LOAD_WORD, _NUMBER_OFFSET),
        _encode(_JUMP_IF_GREATER_OR_EQUAL, _X32_BIT, 0, 1),
        _encode(_RETURN, _KILL),
    ]
    for numbers in _DENIED.values():
        program += _return_if_equal(numbers[column], _DENY)
    program += [
        _encode(_JUMP_IF_EQUAL, sockets[0], 2),
        _encode(_JUMP_IF_EQUAL, sockets[1], 1),
        _encode(_RETURN, _ALLOW),
        _encode(_LOAD_WORD, _FIRST_ARGUMENT_OFFSET),  # the kernel ignores the upper half of an int
    ]
    for family in _ALLOWED_FAMILIES:
        program += _return_if_equal(family, _ALLOW)
    return b"".join([*program, _encode(_RETURN, _DENY)])


def _return_if_equal(value: int, action: int) -> list[bytes]:
    return [_encode(_JUMP_IF_EQUAL, value, 0, 1), _encode(_RETURN, action)]


def _return_unless_equal(value: int, action: int) -> list[bytes]:
    return [_encode(_JUMP_IF_EQUAL, value, 1, 0), _encode(_RETURN, action)]


def _encode(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a `struct sock_filter`; both jumps are relative to the next instruction."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _join_new_session_keyring() -> None:
    """Replace the session keyring by an empty one, as a second layer below the filter.

    A kernel or container without keyrings has none to protect, and a user has a quota of keyrings.
    """
    number = _DENIED["keyctl"][[*_MACHINES].index(platform.machine())]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None) < 0:
        error = ctypes.get_errno()
        if error not in (errno.ENOSYS, errno.EPERM, errno.EDQUOT):
            raise OSError(error, f"cannot create a session keyring: {os.strerror(error)}")


def _restrict_process() -> None:
    """Apply the filter to this process, which ends with its parent."""
    content = build_filter()
    buffer = ctypes.create_string_buffer(content, len(content))
    # struct sock_fprog: number of instructions, and their address
    program = struct.pack("@HP", len(content) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, *[ctypes.c_ulong] * 2]
    for option, value, pointer in (
        (_PR_SET_PDEATHSIG, signal.SIGKILL, None),
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program),
    ):
        if prctl(option, value, pointer, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl option {option}: {os.strerror(error)}")


if __name__ == "__main__":
    _join_new_session_keyring()
    if sys.argv[1] == "weak":
        _restrict_process()
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  a list of words needs no shell
