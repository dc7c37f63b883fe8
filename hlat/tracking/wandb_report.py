"""W&B report of a study: verdicts and tables as text, and the runs grouped by their factors.

W&B stores reports on its servers, so that saving one requires an account that may write to the
project.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hlat.config.config_errors import ConfigError
from hlat.config.seeds import SEED_KEYS

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import Report

_MAX_TITLE_LENGTH = 128
_METRICS_BY_PREFIX = {"heldout_bits_per_byte": "eval/{}/bits_per_byte", "scores": "eval/{}/score"}
"""Keys in W&B of metrics by source or task."""


@dataclass(frozen=True)
class StudyReport:
    """Content of a report.

    Attributes:
        title: Question of the study, or another title.
        verdicts: One line per comparison.
        tables: Tables in Markdown by title.
        metric: Metric of the study, as in `study.metric`.
        factors: Keys of the settings that the points differ in.
        run_ids: Ids of the runs in W&B; empty: the report has no charts.
    """

    title: str
    verdicts: Sequence[str]
    tables: Mapping[str, str]
    metric: str
    factors: Sequence[str] = ()
    run_ids: Sequence[str] = field(default_factory=list)


def build_report(study: StudyReport, entity: str, project: str) -> "Report":
    """Return the report; call its `save()` to upload it."""
    from wandb_workspaces.reports.v2 import interface

    blocks: list[Any] = [interface.H2("Verdicts"), interface.UnorderedList([*study.verdicts])]
    for title, table in study.tables.items():
        blocks += [interface.H2(title), interface.MarkdownBlock(table)]
    if study.run_ids:
        blocks += [interface.H2("Runs"), _build_charts(study, entity, project)]
    title = study.title[:_MAX_TITLE_LENGTH]
    return interface.Report(
        entity=entity, project=project, title=title, blocks=blocks, width="fluid"
    )


def save_report(study: StudyReport, project: str, entity: str | None = None) -> str:
    """Upload a report and return its URL; without `entity`, it is one of the account's default.

    Raises:
        ConfigError: W&B is not installed, has no API key, cannot be reached, or rejects the report.
    """
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError("a W&B report needs wandb-workspaces; pip install 'hlat[wandb]'")
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    location = f"{entity}/{project}" if entity else project
    try:
        if os.environ.get("WANDB_MODE", "online") != "online":
            reason = f"WANDB_MODE={os.environ['WANDB_MODE']} is set; unset it"
        elif not wandb.login(prompt=False):
            reason = "there is no API key; run wandb login, or set WANDB_API_KEY"
        else:
            report = build_report(study, entity or str(wandb.Api().default_entity), project)
            report.save()
            return str(report.url)
    except Exception as error:  # the libraries of W&B raise many types
        message = [*str(error).strip().splitlines(), type(error).__name__][0]
        remedy = "check the connection, the names, and that the account may write to the project"
        reason = f"{message}; {remedy}"
    raise ConfigError(f"wandb={location}: the report was not saved: {reason}")


def get_metric_key(metric: str) -> str:
    """Return the key in W&B of the metric of a study."""
    prefix, _, name = metric.partition(".")
    return _METRICS_BY_PREFIX.get(prefix, metric).format(name) if name else metric


def _build_charts(study: StudyReport, entity: str, project: str) -> Any:
    """Return charts of the runs, grouped by factors, and the table of the runs below them."""
    from wandb_workspaces import expr
    from wandb_workspaces.reports.v2 import interface

    metric = get_metric_key(study.metric)
    columns = [f"config:{_nest(key)}" for key in (*study.factors, *SEED_KEYS)]
    runs = interface.Runset(
        entity=entity,
        project=project,
        name="runs of the study",
        filters=[expr.Metric("ID").isin([*study.run_ids])],
        groupby=[f"config.{key}" for key in study.factors],
        pinned_columns=["run:displayName", *columns, f"summary:{metric}", "summary:state"],
    )
    panels: list[Any] = [
        interface.LinePlot(title="loss", x="tokens", y=["train/loss"]),
        interface.LinePlot(
            title="held-out bits per byte", x="tokens", y=["eval/mean/bits_per_byte"]
        ),
        interface.BarPlot(title=metric, metrics=[metric]),
    ]
    return interface.PanelGrid(runsets=[runs], panels=panels)


def _nest(key: str) -> str:
    """Return a key of the configuration as W&B stores it: `optimizer.value.lr`."""
    group, _, name = key.partition(".")
    return f"{group}.value.{name}" if name else f"{group}.value"
