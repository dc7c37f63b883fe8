"""Composition of the points of a sweep, again for Hydra's records of points.

A composed configuration has half a megabyte, so points do not store theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict


@dataclass(frozen=True)
class PointComposer:
    """Composer of the points of a sweep with its configuration `config`."""

    context: HydraContext
    config: DictConfig

    @property
    def job_name(self) -> str:
        """Name of the job in Hydra's section, which all points share."""
        return str(self.config.hydra.job.name)

    def compose(self, overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
        """Return the configuration of a point, and Hydra's section of it."""
        composed = self.context.config_loader.load_sweep_config(self.config, [*overrides])
        with open_dict(composed):
            hydra_config = composed.pop("hydra")
        return composed, hydra_config


class PointReturn(JobReturn):
    """Hydra's record of a point that was run or submitted.

    Its configurations are composed when they are read.
    """

    def __init__(
        self,
        composer: PointComposer,
        overrides: Sequence[str],
        run_name: str,
        number: int,
        id_: str,
    ) -> None:
        super().__init__([*overrides], task_name=composer.job_name, status=JobStatus.COMPLETED)
        del self.cfg, self.hydra_cfg  # attributes of the base class, which are properties here
        self._composer, self._run_name, self._number, self._id = composer, run_name, number, id_

    @cached_property
    def cfg(self) -> DictConfig:  # type: ignore[override]
        """Configuration of the point, with the name of its run."""
        composed, _ = self._composer.compose(self.overrides or ())
        composed.run.name = self._run_name
        return composed

    @cached_property
    def hydra_cfg(self) -> DictConfig:  # type: ignore[override]
        """Hydra's section, with number and id of the job."""
        _, hydra_config = self._composer.compose(self.overrides or ())
        with open_dict(hydra_config):
            hydra_config.job.num, hydra_config.job.id = self._number, self._id
            hydra_config.job.name = self.task_name
        return OmegaConf.create({"hydra": hydra_config})
