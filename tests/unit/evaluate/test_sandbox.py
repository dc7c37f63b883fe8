"""Escape attempts: each program prints what it could access."""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.evaluate import sandbox, seccomp_filter
from hlat.evaluate.sandbox import ResourceLimits, run_program

pytestmark = pytest.mark.xdist_group("sandboxes")  # some look for remaining processes

try:
    sandbox.validate_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

SHORT_LIMITS = ResourceLimits(seconds=3.0, cpu_seconds=2)


def _list_sandboxed_processes():
    """Return the process ids of all sandboxed programs on this machine."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name, *arguments = path.read_bytes().split(b"\0")
            if b"python" in name and any(b"[resource.setrlimit(k" in word for word in arguments):
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def test_output_is_captured():
    program = (
        "import math, re, json, sys\nprint(math.sqrt(4), flush=True)\nprint('b', file=sys.stderr)"
    )
    result = run_program(program)
    assert (result.exit_code, result.output, result.kill_reason) == (0, "2.0\nb\n", "")


def test_exit_code_is_returned():
    assert run_program("import sys; sys.exit(7)").exit_code == 7
    assert "ZeroDivisionError" in run_program("1 / 0").output
    assert run_program("import os; os.kill(os.getpid(), 9); os.abort()").exit_code > 1


def test_network_is_unreachable(tmp_path):
    """Programs cannot connect to a server on the loopback address of this machine."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run_program(
            f"import socket; socket.create_connection({server.getsockname()!r}, 1)"
        )
    assert result.exit_code == 1
    assert "Connection refused" in result.output  # by the loopback device of the sandbox
    for address in ("('1.1.1.1', 53)", "('localhost', 80)"):
        assert run_program(f"import socket; socket.create_connection({address}, 1)").exit_code == 1
    interfaces = (
        "import socket\n"
        "for index in range(1, 100):\n"
        "    try: print(socket.if_indextoname(index))\n"
        "    except OSError: pass\n"
    )
    assert run_program(interfaces).output in ("lo\n", "")
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0hlat test")
    abstract.listen()
    result = run_program(r"import socket; socket.socket(socket.AF_UNIX).connect('\0hlat test')")
    assert "ConnectionRefusedError" in result.output
    abstract.close()


@pytest.mark.slow
def test_user_files_are_unreadable(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a token")
    os.chmod(tmp_path, 0o777)
    for path in (secret, Path.home() / ".bashrc", Path("/etc/passwd"), Path("/proc/1/environ")):
        assert "FileNotFoundError" in run_program(f"print(open({str(path)!r}).read())").output
    for directory in (tmp_path, Path("/etc"), Path("/proc/self"), Path("/sys")):
        assert (
            "FileNotFoundError" in run_program(f"import os; os.listdir({str(directory)!r})").output
        )


def test_root_contains_only_software():
    result = run_program(
        "import os\n"
        "for directory, _, files in os.walk('/'):\n"
        "    for name in files:\n"
        "        path = os.path.join(directory, name)\n"
        "        if not path.startswith(('/usr/', '/lib', '/dev/')): print(path)\n"
    )
    prefix = sys.base_prefix
    assert all(line.startswith(prefix) for line in result.output.splitlines()[:1000]), (
        result.output[:300]
    )


def test_only_home_is_writable():
    program = f"""
import os
for directory in ('/', '/usr', '/usr/lib', '/dev', '/tmp', {sys.base_prefix!r}, os.path.dirname(os.__file__)):
    try:
        open(directory + '/x', 'w')
        print('wrote', directory)
    except OSError as error:
        print(type(error).__name__)
print(os.getcwd(), os.environ['HOME'], os.listdir('.'))
open('x', 'w').write('data')
print(open('/home/x').read())
"""
    result = run_program(program)
    assert result.exit_code == 0, result.output
    assert "wrote" not in result.output
    assert result.output.endswith("/home /home []\ndata\n")


PRIVILEGED_CALLS = [
    "import os; os.remove(os.__file__)",
    "import shutil; shutil.rmtree('/usr/lib')",
    "import os; os.rmdir('/home')",
    "import os; os.chmod('/usr', 0o777)",
    "import os; os.rename('/home', '/x')",
    "import os; os.mknod('/home/disk', 0o60666, os.makedev(8, 0))",
    "import os; os.setuid(0)",
    "import os; os.chroot('/home')",
    "import ctypes as c; l = c.CDLL(None, use_errno=True); assert not l.mount(b'x', b'/home', b'tmpfs', 0, None)",
    "import ctypes as c; assert not c.CDLL(None).umount2(b'/home', 2)",
    "import ctypes as c; assert not c.CDLL(None).unshare(0x10000000)",
    "import ctypes as c; assert not c.CDLL(None).mount(b'x', b'/usr', None, 0x1020, None)",
    "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "import _posixshmem as s, os; s.shm_open('/hlat', os.O_CREAT | os.O_RDWR, mode=0o600)",
]


def test_privileged_calls_fail():
    program = f"""
for call in {PRIVILEGED_CALLS!r}:
    try:
        exec(call)
        print('allowed:', call)
    except (OSError, AssertionError):
        print('failed')
"""
    assert run_program(program).output == "failed\n" * len(PRIVILEGED_CALLS)
    assert Path(os.__file__).is_file()


both_sandboxes = pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "weak"])
ADD_KEY, REQUEST_KEY, KEYCTL = (
    (248, 249, 250) if platform.machine() == "x86_64" else (217, 218, 219)
)
SESSION_KEYRING = -3


@pytest.fixture
def key():
    """Return a key of the user's session keyring."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(KEYCTL, 1, None) < 0:  # KEYCTL_JOIN_SESSION_KEYRING
        pytest.skip(f"no keyrings: {os.strerror(ctypes.get_errno())}")
    return libc.syscall(ADD_KEY, b"user", b"hlat test", b"a token", 7, SESSION_KEYRING)


@both_sandboxes
def test_keyring_is_unreachable(key, isolated):
    program = f"""
import ctypes
call, buffer = ctypes.CDLL(None).syscall, ctypes.create_string_buffer(7)
print(call({KEYCTL}, 11, {key}, buffer, 7), buffer.value)  # KEYCTL_READ
print(call({KEYCTL}, 2, {key}, b'changed', 7))  # KEYCTL_UPDATE
print(call({KEYCTL}, 10, {SESSION_KEYRING}, b'user', b'hlat test', 0))  # KEYCTL_SEARCH
print(call({REQUEST_KEY}, b'user', b'hlat test', None, 0))
print(call({ADD_KEY}, b'user', b'hlat test', b'changed', 7, {SESSION_KEYRING}))
"""
    assert run_program(program, isolated=isolated).output == "-1 b''\n" + "-1\n" * 4
    content = ctypes.create_string_buffer(7)
    assert ctypes.CDLL(None).syscall(KEYCTL, 11, key, content, 7) == 7
    assert content.raw == b"a token"


def test_program_starts_with_an_empty_session_keyring(key):
    """Test the second layer without the filter of system calls."""
    search = f"print(ctypes.CDLL(None).syscall({KEYCTL}, 10, {SESSION_KEYRING}, b'user', b'hlat test', 0))"
    command = [sys.executable, "-c", f"import ctypes; {search}"]
    start = [sys.executable, seccomp_filter.__file__, "isolated"]
    assert int(subprocess.check_output(command)) == key
    assert subprocess.check_output([*start, *command]) == b"-1\n"


@both_sandboxes
def test_shared_memory_is_denied(isolated):
    """System V memory that is not attached does not count as address space."""
    program = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
libc.shmdt.argtypes = (ctypes.c_void_p,)
size, segments = 100 << 20, []
for _ in range(3):
    segment = libc.shmget(0, ctypes.c_size_t(size), 0o1600)
    if segment >= 0:
        segments.append(segment)
        address = libc.shmat(segment, None, 0)
        ctypes.memset(address, 1, size)
        libc.shmdt(address)
print(len(segments) * size)
for segment in segments:
    libc.shmctl(segment, 0, None)
queue, semaphore = libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)
print(queue, libc.msgctl(queue, 0, None), semaphore, libc.semctl(semaphore, 0, 0))
try:
    print(os.memfd_create('x'))
except OSError as error:
    print(error.strerror)
"""
    result = run_program(program, ResourceLimits(memory_bytes=1 << 28), isolated)
    assert result.output == "0\n-1 -1 -1 -1\nOperation not permitted\n"


@both_sandboxes
def test_socket_families_are_limited(isolated):
    program = """
import ctypes, itertools, socket
families = set()
for family, kind in itertools.product(range(64), range(1, 6)):
    try:
        socket.socket(family, kind).close()
        families.add(family)
    except OSError:
        pass
pair = socket.socketpair()
ring = ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(128))  # io_uring_setup
print(sorted(families - {1, 2, 10}), ring, len(pair))
"""
    assert run_program(program, isolated=isolated).output == "[] -1 2\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other ABIs of x86_64")
@both_sandboxes
def test_calls_of_other_abis_kill_the_program(isolated):
    machine_code = "b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3'"  # mov eax, 20; int 0x80; ret
    getpid_of_i386 = f"""
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write({machine_code})
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
print('returned', call())
"""
    getpid_of_x32 = "import ctypes; print('returned', ctypes.CDLL(None).syscall(0x40000000 | 39))"
    for program in (getpid_of_i386, getpid_of_x32):
        result = run_program(program, isolated=isolated)
        assert result.exit_code in (-signal.SIGSYS, 128 + signal.SIGSYS)
        assert result.output == ""


def test_disk_use_is_limited():
    assert "[Errno 27]" in run_program("open('x', 'wb').write(bytes(9 << 20))").output
    many = "for i in range(9): open(str(i), 'wb').write(bytes(4 << 20))"
    assert "No space left" in run_program(many).output
    result = run_program("import time\nfor i in range(99): open(str(i), 'w')\ntime.sleep(9)")
    assert "more than 64 files" in result.kill_reason
    assert "Too many open files" in run_program("f = [open('/dev/null') for _ in range(99)]").output


def test_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    result = run_program("import os; print(sorted(os.environ), os.getuid() != 0, os.getppid())")
    assert "SECRET" not in result.output
    assert result.output == "['HOME', 'LC_CTYPE', 'PWD'] True 0\n"


def test_other_processes_cannot_be_killed():
    result = run_program(
        "import os, signal\n"
        f"for pid in [*range(2, 200), {os.getpid()}, {os.getppid()}]:\n"
        "    try: os.kill(pid, signal.SIGKILL); print('killed', pid)\n"
        "    except ProcessLookupError: pass\n"
        "os.killpg(os.getpgid(0), signal.SIGKILL) if os.getpgid(0) else print('no group')\n"
        "try: os.kill(-1, signal.SIGKILL)\n"
        "except ProcessLookupError: print('no process')\n"
    )
    assert result.output == "no group\nno process\n"


@pytest.mark.slow  # 3 s
def test_fork_bomb_is_killed():
    since = time.monotonic()
    result = run_program("import os\nwhile True: os.fork()", SHORT_LIMITS)
    assert result.exit_code != 0
    assert "Resource temporarily unavailable" in result.output
    assert time.monotonic() - since < 15
    persistent = (
        "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"
    )
    result = run_program(persistent, SHORT_LIMITS)
    assert "timed out" in result.kill_reason
    assert not _list_sandboxed_processes()


@pytest.mark.slow  # waits for the time limit
def test_threads_count_as_processes():
    program = "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()"
    assert "can't start new thread" in run_program(program, SHORT_LIMITS).output


@pytest.mark.parametrize(
    "bomb", ["x = bytes(1 << 31)", "x = []\nwhile True: x.append('a' * 10**6)"]
)
def test_memory_bomb_is_stopped(bomb):
    assert "MemoryError" in run_program(bomb, ResourceLimits(memory_bytes=1 << 28)).output


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        ("while True: pass", ResourceLimits(seconds=60.0, cpu_seconds=1)),
        ("import time; time.sleep(60)", ResourceLimits(seconds=1.0)),
        (
            "import signal, time\nfor s in range(1, 64):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(60)",
            ResourceLimits(seconds=1.0),
        ),
        ("input(); import select; select.select([], [], [])", ResourceLimits(seconds=1.0)),
    ],
)
def test_time_is_limited(program, limits):
    since = time.monotonic()
    result = run_program(program, limits)
    assert result.exit_code != 0
    assert "bwrap" not in result.output
    assert time.monotonic() - since < 20


def test_output_is_limited():
    result = run_program("while True: print('x' * 10**6)")
    assert result.exit_code is None
    assert "printed more than 65536 bytes" in result.kill_reason
    assert len(result.output) == 1 << 16


def test_daemon_is_killed_with_its_program():
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(1000)
    os._exit(0)
print('done')
"""
    result = run_program(program)
    assert (result.exit_code, result.output) == (0, "done\n")
    assert not _list_sandboxed_processes()


@pytest.mark.parametrize("seconds", [0, 0.02, 0.05, 0.1, 0.5])
def test_program_is_killed_with_its_parent(seconds):
    """Kill the parent while it starts the sandbox, and while the program runs."""
    script = (
        "from hlat.evaluate.sandbox import ResourceLimits, run_program\n"
        "run_program('import time; time.sleep(1000)', ResourceLimits(seconds=1000.0))"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 30
    while not _list_sandboxed_processes():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while (remaining := _list_sandboxed_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not remaining


def test_program_does_not_start_if_its_parent_ended_after_the_report(tmp_path):
    start_fd, parent_fd = os.pipe()
    os.write(parent_fd, b"\n")
    os.close(parent_fd)
    with open(tmp_path / "program", "w+") as file:
        fds = (file.fileno(), start_fd)
        command = sandbox._build_command(fds, (0, 0), ResourceLimits(), False)
        done = subprocess.run(command, pass_fds=fds, capture_output=True, text=True)
    os.close(start_fd)
    assert (done.returncode, done.stderr) == (1, "the parent has ended\n")


def test_file_descriptors_are_not_inherited(tmp_path):
    with open(tmp_path / "secret", "w+") as file:
        os.set_inheritable(file.fileno(), True)
        file.write("a token")
        file.flush()
        result = run_program(
            "import os, sys\n"
            "for fd in range(3, 32):\n"
            "    try: print(os.pread(fd, 100, 0) if fd != int(sys.argv[1]) else 'source')\n"
            "    except OSError: pass\n"
        )
    assert "token" not in result.output


def test_missing_bwrap_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*accept_weak_sandbox"):
        sandbox.validate_isolation()
    sandbox.validate_isolation(isolated=False)


def test_machine_without_a_filter_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    for isolated in (True, False):
        with pytest.raises(ConfigError, match=r"riscv64.*x86_64 or aarch64"):
            sandbox.validate_isolation(isolated)


def test_unusable_bwrap_is_refused(monkeypatch, tmp_path):
    command = tmp_path / "bwrap"
    command.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace; exit 1")
    command.chmod(0o755)
    monkeypatch.setattr(sandbox, "_build_command", lambda *_: [str(command)])
    with pytest.raises(ConfigError, match=r"No permissions.*user namespaces.*accept_weak_sandbox"):
        sandbox.validate_isolation()


@pytest.mark.slow
def test_weak_sandbox():
    program = "import os; print(os.environ.get('PATH'), os.listdir('.'), os.getcwd() == os.environ['HOME'])"
    assert run_program(program, isolated=False).output == "None [] True\n"
    assert "MemoryError" in run_program("x = bytes(1 << 31)", isolated=False).output
    assert (
        "timed out"
        in run_program("import time; time.sleep(9)", ResourceLimits(seconds=1.0), False).kill_reason
    )
