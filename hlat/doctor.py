"""Tells whether the arithmetic of a run is right here: `python -m hlat.doctor`.

    compose -> shrink -> as many processes as the layout needs -> machine -> arithmetic -> verdict

It takes the overrides of `python -m hlat.train` and checks that very layout, recipe, engine and
device with a smaller model, in a minute, before the run.
"""

import sys

from omegaconf import DictConfig

from hlat.config import entry
from hlat.config.arguments import leave
from hlat.config.errors import Exit
from hlat.config.resolve import resolve
from hlat.config.run import Config
from hlat.diagnosis.shrink import shrink
from hlat.engine import processes
from hlat.tracking import run_folder

_INTERRUPTED = 130

_HELP = """\
usage: python -m hlat.doctor [OVERRIDE...]

Check the arithmetic of a run: its layout, recipe, engine and device, with a small model.

examples:
  python -m hlat.doctor
  python -m hlat.doctor parallelism.tp=2 parallelism.pp=2 precision=mixed
  torchrun --nproc-per-node=8 -m hlat.doctor parallelism.tp=8

Overrides are those of python -m hlat.train. What was found is printed, and written to
<run.root>/doctor/<run.name>/doctor.json. Exit code 0: healthy; 3: something computes wrongly;
4: this machine is unhealthy; 2: the configuration is wrong. docs/doctor.md tells more."""


def main() -> None:
    """Check what is composed, and exit."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(_HELP)
        return
    entry.run(doctor)


def doctor(composed: DictConfig) -> Exit:
    """Check the composed configuration; return the exit code."""
    config = shrink(resolve(composed), processes.place().size)
    if not processes.must_start(config):
        return processes.recorded(lambda: examine(config))
    from hlat.recovery import supervisor

    code = supervisor.start(config, entry.command(sys.executable, entry.overrides(), "hlat.doctor"))
    if code is Exit.PREEMPTED:  # by a signal, which nothing here is saved after
        sys.exit(_INTERRUPTED)
    return code


def examine(config: Config) -> Exit:
    """Check as one of the processes."""
    from hlat.diagnosis import checkup
    from hlat.engine.create import create_engine

    with run_folder.claimed(config.run, processes.place().rank == 0) as folder:
        return checkup.examine(config, folder, create_engine(config))


if __name__ == "__main__":
    leave(main)
