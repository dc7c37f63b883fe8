"""The doctor on a rank of hlat's engine on NxD."""

from hlat.config.run import Config
from hlat.doctor.check_result import CheckResult
from hlat.doctor.check_runner import run_checks
from hlat.doctor.engine_harness import EngineHarness
from hlat.engine.engine_factory import create_engine
from tests.nxd.on_ranks.faults import planted


def diagnose(config: Config, names: list[str], fault: str | None = None) -> list[CheckResult]:
    """Return the results of checks with or without a fault."""
    with planted(fault):
        return [*run_checks(EngineHarness(config, create_engine(config)), names)]
