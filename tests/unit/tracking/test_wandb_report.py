"""Report of a study in W&B: its content, and what to do if it cannot be saved.

W&B has no server for tests. A function replaces the GraphQL client.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hlat.config.config_errors import ConfigError
from hlat.tracking import wandb_report
from hlat.tracking.wandb_logger import build_tags
from hlat.tracking.wandb_report import StudyReport

STUDY = StudyReport(
    title="Is 0.99 worse?",
    verdicts=["optimizer.beta2=0.99 - optimizer.beta2=0.95: worse (p 0.01)"],
    tables={"Effects": "| Comparison | Difference |\n| --- | --- |\n| a\\|b | +0.0120 |"},
    metric="scores.arc",
    factors=["optimizer.beta2", "precision.name"],
    run_ids=["1a2b", "3c4d"],
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in wandb


@pytest.fixture(autouse=True)
def without_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the variables of GraphQL requests; the account is `me`."""
    import wandb
    from wandb_workspaces.reports.v2 import interface

    sent: list[dict[str, Any]] = []

    def execute(_: object, __: str, variables: dict[str, Any]) -> dict[str, Any]:
        sent.append(variables)
        if "spec" not in variables:
            return {"project": {"internalId": "UHJvamVjdDox"}}
        project = {"name": variables["projectName"], "entityName": variables["entityName"]}
        view = {"id": "Vmlldzox", "displayName": variables["displayName"], "project": project}
        return {"upsertView": {"view": view | {"spec": variables["spec"]}}}

    api = SimpleNamespace(
        default_entity="me",
        projects=lambda _: [SimpleNamespace(name="hlat")],
        client=SimpleNamespace(app_url="https://wandb.test"),
    )
    monkeypatch.setattr(interface, "execute_graphql", execute)
    monkeypatch.setattr(wandb, "Api", lambda: api)
    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    return sent


@pytest.mark.parametrize("entity", ["team", None])
def test_the_report_has_verdicts_tables_and_the_grouped_runs(
    requests: list[dict[str, Any]], entity: str | None
) -> None:
    url = wandb_report.save_report(STUDY, "hlat", entity)
    assert url.startswith(f"https://wandb.test/{entity or 'me'}/hlat/reports/Is-0.99-worse")
    saved = requests[-1]
    assert (saved["entityName"], saved["projectName"]) == (entity or "me", "hlat")
    spec = json.loads(saved["spec"])
    text = json.dumps(spec)
    assert STUDY.verdicts[0] in text
    tables = [block["content"] for block in spec["blocks"] if block["type"] == "markdown-block"]
    assert tables == ["| Comparison | Difference |\n| --- | --- |\n| a\\|b | +0.0120 |"]
    (grid,) = (block for block in spec["blocks"] if block["type"] == "panel-grid")
    (runs,) = grid["metadata"]["runSets"]
    assert [key["name"] for key in runs["grouping"]] == [
        *("optimizer.value.beta2", "precision.value.name")
    ]
    assert '"value": ["1a2b", "3c4d"]' in json.dumps(runs["filters"])
    assert "eval/arc/score" in json.dumps(grid)


def test_error_of_an_unsaved_report_contains_a_remedy(
    monkeypatch: pytest.MonkeyPatch, requests: list[dict[str, Any]]
) -> None:
    from wandb_workspaces.reports.v2 import interface

    def refuse(*_: object) -> None:
        raise ValueError("permission denied\nbecause")

    monkeypatch.setattr(interface, "execute_graphql", refuse)
    with pytest.raises(ConfigError, match=r"wandb=team/hlat: .*permission denied; check the conn"):
        wandb_report.save_report(STUDY, "hlat", "team")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match=r"WANDB_MODE=offline is set; unset it"):
        wandb_report.save_report(STUDY, "hlat")


def test_without_an_api_key_nothing_is_sent() -> None:
    with pytest.raises(ConfigError, match=r"there is no API key; run wandb login, or set WANDB_"):
        wandb_report.save_report(STUDY, "hlat")


def test_runs_of_a_study_have_their_factors_and_seed_as_tags() -> None:
    config = {
        "study": {"baseline": {"optimizer.beta2": 0.95, "precision": "bf16"}},
        "optimizer": {"name": "adamw", "beta2": 0.99},
        "precision": {"name": "mixed"},
        "run": {"seed": 2},
    }
    tags = ["mine", "adamw", "mixed", "optimizer.beta2=0.99", "run.seed=2"]
    assert build_tags(["mine"], config) == tags
    assert build_tags(["mine"], config | {"study": {}}) == tags[:3]
