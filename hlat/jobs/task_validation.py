"""Validation of the tasks and data sets of evaluations before the first stage starts."""

import importlib.util

from hlat.config.config_errors import ConfigError
from hlat.evaluate.lm_eval_tasks import TaskLoader, validate_harness_installed
from hlat.evaluate.paper_tasks import OWN_TASKS
from hlat.jobs.campaign_file import Campaign


def validate_tasks(campaign: Campaign, is_local: bool) -> None:
    """Raise ConfigError if an evaluation has an unknown task, or no directory of data sets.

    Names of tasks are validated where lm-evaluation-harness is installed; with `is_local`, it must
    be.
    """
    problems: list[str] = []
    for stage in campaign.stages:
        names = [name for name in stage.tasks if name not in OWN_TASKS]
        if not names:
            continue
        try:
            if is_local:
                validate_harness_installed()
            is_installed = importlib.util.find_spec("lm_eval") is not None
            loader = TaskLoader(campaign.find_data(stage))
            loader.resolve_tasks(names if is_installed else [], stage.shots)
        except ConfigError as error:
            problems += [f"stages.{stage.name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
