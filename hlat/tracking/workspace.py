"""The layout of a W&B project as code: what lies over what, and what one looks at first.

W&B keeps layouts on its servers, so `save` needs an account. One line makes it for a project:

    python -c "from hlat.tracking.workspace import workspace; workspace('ENTITY', 'hlat').save()"
"""

from typing import TYPE_CHECKING

from hlat.tracking.listener import LEARNING

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

_SPEED = ("tokens_per_second", "mfu", "step_seconds", "data_wait_seconds", "memory_bytes")
_COST = ("cost_usd", "cpt_usd")


def workspace(entity: str, project: str) -> "Workspace":
    """Return the layout for hlat's runs; its `save()` sends it.

    Args:
        entity: User or team that owns the project.
        project: As in tracking.wandb.project.

    Raises:
        ImportError: wandb-workspaces is not installed; it comes with hlat[wandb].
    """
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2.interface import LinePlot

    def plot(key: str, axis: str) -> LinePlot:
        title = key.rpartition("/")[2].replace("_", " ")
        return LinePlot(title=title, x=axis, y=[key])

    heldout = LinePlot(
        title="held-out bits per byte", x="tokens", metric_regex="^heldout/bits_per_byte/.*"
    )
    read = LinePlot(title="tokens by source", x="step", metric_regex="^data/tokens/.*")
    learning = [plot(f"train/{key}", "tokens") for key in LEARNING]
    machine = [plot(f"speed/{key}", "step") for key in (*_SPEED, *_COST)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="hlat",
        sections=[
            workspaces.Section(name="Learning", panels=[*learning, heldout], is_open=True),
            workspaces.Section(name="Machine", panels=[*machine], is_open=True),
            workspaces.Section(name="Data", panels=[read]),
        ],
    )
