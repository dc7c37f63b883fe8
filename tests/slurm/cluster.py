"""A real Slurm of several nodes on this machine: loopback only, without systemd, cgroups or
accounting, with separate keys and folders.

Each node's slurmd has a UTS namespace, so that its processes see the name of the node and can be
killed at once, as by a power failure.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "srun", "unshare")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_CONF = """\
ClusterName=hlat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
JobRequeue=1
ReturnToService=1
SlurmctldTimeout=30
SlurmdTimeout=15
MessageTimeout=30
KillWait=5
MinJobAge=7200
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=train Nodes={train} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes={train} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
PartitionName=background Nodes={background} MaxTime=INFINITE State=UP
"""
"""FirstJobId differs between clusters on this machine, since the port of a run depends on its job;
cred_expire is also the wait of a requeued job, at least 5 s; SlurmdTimeout is the longest silence
of a node; KillWait is the time of a cancelled process for saving."""


def missing() -> str | None:
    """Return the reason why no cluster can be started here, or None."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if absent:
        return (
            f"not installed: {', '.join(absent)} (apt install slurmctld slurmd slurm-client munge)"
        )
    if os.geteuid() != 0:
        return "nodes with different host names need root"
    namespaced = subprocess.run(["unshare", "--uts", "true"], capture_output=True)
    return None if namespaced.returncode == 0 else "unshare --uts is not allowed here"


class Cluster:
    """Context manager of a Slurm with nodes n1, n2 ...

    Args:
        folder: Directory of its configuration, state and logs.
        num_train: Nodes of the default partition, train, and of urgent, which preempts it.
        num_background: Further nodes, of partition background.
    """

    def __init__(self, folder: Path, num_train: int, num_background: int) -> None:
        num_nodes = num_train + num_background
        self.folder, self.names = folder, [f"n{i + 1}" for i in range(num_nodes)]
        self._num_train = num_train
        self.conf = folder / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self.conf), "PATH": _PATH}
        for name in [name for name in self.environment if name.startswith(("SLURM_J", "SBATCH_"))]:
            del self.environment[name]
        self._host_mark = f"# hlat-test-slurm {folder}\n"
        self._munged: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for job in self.run("squeue", "--noheader", "--format=%i", check=False).split():
            self.run("scancel", "--signal=KILL", job, check=False)
        for name in self.names:
            self.power_off(name)
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / "slurmctld.pid").read_text()), signal.SIGKILL)
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()
        hosts = Path("/etc/hosts")
        lines = hosts.read_text().splitlines(keepends=True)
        hosts.write_text("".join(line for line in lines if not line.endswith(self._host_mark)))

    def run(self, *command: str, check: bool = True) -> str:
        """Return the output of a command."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert not check or done.returncode == 0, (command, done.stderr)
        return done.stdout

    def show_job(self, job: str) -> dict[str, str]:
        """Return the fields of a job in `scontrol show job`."""
        shown = self.run("scontrol", "show", "job", job).split()
        return dict(field.split("=", 1) for field in shown if "=" in field)

    def power_on(self, name: str) -> None:
        """Start a node."""
        start = 'hostname "$0" && exec slurmd -N "$0" -f "$SLURM_CONF"'
        self.run("unshare", "--uts", "sh", "-c", start, name)

    def power_off(self, name: str) -> None:
        """Kill all processes of a node at once."""
        pid = self.folder / f"slurmd-{name}.pid"
        with suppress(OSError, ValueError):
            uts = os.readlink(f"/proc/{int(pid.read_text())}/ns/uts")
            assert uts != os.readlink("/proc/self/ns/uts")
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if os.readlink(process / "ns/uts") == uts:
                        os.kill(int(process.name), signal.SIGKILL)
        pid.unlink(missing_ok=True)

    def start_controller(self) -> None:
        """Start slurmctld with the state of an earlier one."""
        self.run("slurmctld", "-i", "-f", str(self.conf))

    def stop_controller(self) -> None:
        """Stop slurmctld, which saves its state."""
        pid = int((self.folder / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        self.wait_until(60, "slurmctld ends", lambda: not Path(f"/proc/{pid}").exists())

    def wait_until(self, seconds: float, condition: str, is_met) -> None:
        """Wait for a condition; at the timeout, raise AssertionError with the cluster's state."""
        deadline = time.monotonic() + seconds
        while not is_met():
            if time.monotonic() > deadline:
                shown = self.run("squeue", "--states=all", check=False)
                shown += self.run("sinfo", "-N", "-l", check=False)
                raise AssertionError(f"not within {seconds:g} s: {condition}\n{shown}")
            time.sleep(0.1)

    def wait_until_idle(self, *names: str) -> None:
        """Wait until the nodes are up and idle."""
        command = ("sinfo", "--noheader", "-N", "--states=idle", "--format=%N")

        def idle() -> set[str]:
            return {*self.run(*command, check=False).split()}

        self.wait_until(180, f"{', '.join(names)} are idle", lambda: {*names} <= idle())

    def _start(self) -> None:
        host = socket.gethostname()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # Another cluster on this machine may remove its lines for the same names
        names = self.names if _address(host) == "127.0.0.1" else [host, *self.names]
        with Path("/etc/hosts").open("a") as hosts:
            hosts.writelines(f"127.0.0.1 {name} {self._host_mark}" for name in names)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=4 "
            "RealMemory=1000 State=UNKNOWN"
            for name in self.names
        )
        train, background = self.names[: self._num_train], self.names[self._num_train :]
        self.conf.write_text(
            _CONF.format(
                host=host,
                port=port,
                folder=self.folder,
                nodes=nodes,
                train=",".join(train),
                background=",".join(background),
            )
        )
        (self.folder / "state").mkdir()
        self._munged = subprocess.Popen(
            [
                *("munged", "--foreground", "--force", f"--key-file={key}"),
                *(f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid"),
                *(f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/seed"),
            ],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.wait_until(60, "munge", (self.folder / "munge.socket").exists)
        self.start_controller()
        for name in self.names:
            self.power_on(name)
        self.wait_until_idle(*self.names)


def _address(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port
