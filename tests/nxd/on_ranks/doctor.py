"""What the doctor says on a rank of hlat's engine on NxD."""

from hlat.config.run import Config
from hlat.diagnosis.checkup import check_up
from hlat.diagnosis.patient import Patient
from hlat.diagnosis.verdict import Outcome
from hlat.engine.create import create_engine
from tests.nxd.on_ranks.faults import planted


def diagnose(config: Config, names: list[str], fault: str | None = None) -> list[Outcome]:
    """What checks find, with a fault or without; on the leader."""
    with planted(fault):
        return [*check_up(Patient(config, create_engine(config)), names)]
