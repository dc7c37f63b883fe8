"""The layout of a W&B project (workspace) as code.

W&B stores layouts on its servers, so `save` requires an account:

    python -c "from hlat.tracking.wandb_workspace import build_workspace as build; \
build('ENTITY', 'hlat').save()"
"""

from typing import TYPE_CHECKING

from hlat.tracking.metric_logger import MODEL_METRICS

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

_SPEED_METRICS = ("tokens_per_second", "mfu", "step_seconds", "data_wait_seconds", "memory_bytes")
_COST_METRICS = ("cost_usd", "cpt_usd")


def build_workspace(entity: str, project: str) -> "Workspace":
    """Return the layout of a user's or team's project; call its `save()` to upload it.

    Raise ImportError without wandb-workspaces (pip install 'hlat[wandb]').
    """
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2.interface import LinePlot

    def build_plot(key: str, axis: str) -> LinePlot:
        title = key.rpartition("/")[2].replace("_", " ")
        return LinePlot(title=title, x=axis, y=[key])

    heldout = LinePlot(
        title="held-out bits per byte", x="tokens", metric_regex="^eval/.*/bits_per_byte$"
    )
    scores = LinePlot(title="scores", x="tokens", metric_regex="^eval/.*/score$")
    tokens = LinePlot(title="tokens by source", x="step", metric_regex="^data/tokens/.*")
    model = [build_plot(f"train/{key}", "tokens") for key in MODEL_METRICS]
    speed = [build_plot(f"perf/{key}", "step") for key in (*_SPEED_METRICS, *_COST_METRICS)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="hlat",
        sections=[
            workspaces.Section(name="Learning", panels=[*model, heldout, scores], is_open=True),
            workspaces.Section(name="Machine", panels=[*speed], is_open=True),
            workspaces.Section(name="Data", panels=[tokens]),
        ],
    )
