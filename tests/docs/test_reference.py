"""The generated reference is up to date; every event in the code is listed with its fields."""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hlat.tracking.neuron_monitor import parse_report

pytestmark = pytest.mark.xdist_group("reference")  # one worker builds the pages
REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEFINITIONS = yaml.safe_load((REPOSITORY / "hlat/tracking/metric_definitions.yaml").read_text())
METRICS, EVENTS = DEFINITIONS["metrics"], DEFINITIONS["events"]
PAGES = (
    "api.md",
    "commands.md",
    "configuration.md",
    "engine-capabilities.md",
    "exit-codes.md",
    "metrics.md",
    "models.md",
)


@cache
def _load_generator() -> ModuleType:
    path = REPOSITORY / "docs/generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    built: dict[str, str] = _load_generator().build_pages()
    return built


@pytest.mark.slow  # 8 s: builds all pages
@pytest.mark.parametrize("name", PAGES)
def test_committed_page_is_up_to_date(name: str, pages: dict[str, str]) -> None:
    committed = (REPOSITORY / "docs/reference" / name).read_text()
    assert pages[name] == committed, "run: python docs/generate_reference.py"


@pytest.mark.slow
def test_every_generated_page_is_checked(pages: dict[str, str]) -> None:
    assert sorted(pages) == sorted(PAGES)


def test_changed_metric_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = _load_generator()
    metrics = generator.METRIC_DEFINITIONS["metrics"]
    monkeypatch.setitem(metrics, "loss", {"meaning": "another meaning"})
    assert "another meaning" in generator._build_metrics_page()


def _find_logged_events() -> list[tuple[str, str, set[str]]]:
    """Return line, name and literal field names of each call of a Tracker's log_event."""
    found = []
    for path in sorted((REPOSITORY / "hlat").rglob("*.py")):
        if path.is_relative_to(REPOSITORY / "hlat/jobs"):
            continue  # attempts.jsonl of a Slurm job
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr != "log_event" or len(node.args) != 2:
                continue
            names = [item for item in ast.walk(node.args[0]) if isinstance(item, ast.Constant)]
            fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            line = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
            found += [(line, item.value, fields) for item in names if isinstance(item.value, str)]
    return found


@pytest.mark.slow
def test_logged_events_are_listed_with_their_fields() -> None:
    events = _find_logged_events()
    assert len(events) > 15
    for line, name, fields in events:
        assert name in EVENTS, line
        assert fields <= set(EVENTS[name].get("fields", {})), line
    written_elsewhere = {"score", "restart", "give_up"}  # by the evaluator and the supervisor
    assert {name for _, name, _ in events} == set(EVENTS) - written_elsewhere
    assert not set(EVENTS) & set(DEFINITIONS["service_events"])


def test_neuron_metrics_are_listed() -> None:
    report = {
        "neuron_runtime_data": [
            {
                "report": {
                    "neuroncore_counters": {
                        "neuroncores_in_use": {"0": {"neuroncore_utilization": 50.0}}
                    },
                    "memory_used": {
                        "neuron_runtime_used_bytes": {"neuron_device": 1, "host": 2},
                    },
                    "execution_stats": {"error_summary": {"generic": 0}},
                }
            }
        ],
        "system_data": {"neuron_hw_counters": {"neuron_devices": [{"mem_ecc_uncorrected": 0}]}},
    }
    metrics = parse_report(report)
    assert len(metrics) == 5
    assert set(metrics) <= set(METRICS)
