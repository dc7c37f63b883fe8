"""What the doctor says on a rank of hlat's engine on NxD."""

from hlat.config.run import Config
from hlat.diagnosis.checkup import check_up
from hlat.diagnosis.patient import Patient
from hlat.diagnosis.verdict import Outcome
from hlat.engine.create import create_engine


def diagnose(config: Config, names: list[str]) -> list[Outcome]:
    """What checks find; on the leader."""
    return [*check_up(Patient(config, create_engine(config)), names)]
