"""Name and limits of a node."""

import resource
import socket
import subprocess
import sys

from hlat.recovery import host_info


def test_the_scheduler_names_the_node() -> None:
    assert host_info.get_host_name({"SLURMD_NODENAME": "trn-007"}) == "trn-007"
    assert host_info.get_host_name({}) == socket.gethostname()


def test_the_limit_of_open_files_is_raised_up_to_the_hard_limit() -> None:
    code = (
        "import resource as r; from hlat.recovery.host_info import raise_open_file_limit as allow\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (50, 300))\n"
        "print(allow(40), allow(200), r.getrlimit(r.RLIMIT_NOFILE)[0], allow(5000), allow(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["50", "200", "200", "300", "300"]


def test_unlimited_open_files(monkeypatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert host_info.raise_open_file_limit(10**6) >= 10**6
