"""Common fixtures: a frozen corpus, composition in process, and a run of a second."""

import collections
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from hlat.config import compose as composition
from hlat.config import redaction
from hlat.config.package_dirs import find_package_dir
from hlat.data import row_index

# absl, which tensorboard and rouge-score import, closes the stream that was stderr at its import
# when Hydra configures logging. That stream must not be pytest's capture file.
with contextlib.suppress(ImportError), contextlib.redirect_stderr(sys.__stderr__):
    import absl.logging  # noqa: F401

# As the entry sets it, but before any test module imports torch
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Models of tests are too small for a second thread, and other tests need the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

# GNU readline, which pytest imports, sets the size of a terminal for the workers of pytest-xdist
for _variable in ("COLUMNS", "LINES"):
    os.environ.pop(_variable, None)
# Runs ignore SIGHUP if the process that starts them does, as nohup and some schedulers do
signal.signal(signal.SIGHUP, signal.SIG_DFL)

with contextlib.suppress(ImportError):  # the environment of tests/nxd has no Hypothesis
    from hypothesis import HealthCheck, settings

    # Without time limits, which fail under load
    settings.register_profile("hlat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("hlat")

REPOSITORY = Path(__file__).resolve().parent.parent
_START = time.monotonic()
_RUNNING: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the golden files")
    accelerator = "device of the tests marked cuda; cpu rehearses them without a GPU"
    parser.addoption("--accelerator", choices=["cuda", "cpu"], default="cuda", help=accelerator)
    seconds = "time of tests/fuzz for all readers together"
    parser.addoption("--fuzz-seconds", type=float, default=60.0, help=seconds)
    part = "part K of N of the tests marked slow, such as 1/3 (default: all of them)"
    parser.addoption("--slow-part", metavar="K/N", type=_parse_part, default=(1, 1), help=part)
    minutes = "start no test marked slow after this time; they run last (default: no limit)"
    parser.addoption("--slow-minutes", type=float, default=math.inf, help=minutes)


def _parse_part(text: str) -> tuple[int, int]:
    part, count = map(int, text.split("/"))
    if not 1 <= part <= count:
        raise ValueError(f"{text} is not K/N with K from 1 to N")
    return part, count


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests of other parts; a test belongs to the part of its name's hash."""
    _mark_slow_cases(items)
    part, count = config.getoption("--slow-part")

    def is_selected(item: pytest.Item) -> bool:
        name = item.nodeid.partition("@")[0].encode()
        return "slow" not in item.keywords or zlib.crc32(name) % count == part - 1

    deselected = [item for item in items if not is_selected(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if is_selected(item)]
    if config.getoption("--slow-minutes") < math.inf:
        items.sort(key=lambda item: "slow" in item.keywords)


def _mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of parametrized tests that follow the number of slow_after."""
    counts = collections.Counter[str]()
    for item in items:
        marker = item.get_closest_marker("slow_after")
        if marker is not None and "slow" not in item.keywords:
            test = item.nodeid.partition("[")[0]
            counts[test] += 1
            if counts[test] > marker.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests after the time of --slow-minutes, before their fixtures."""
    minutes = item.config.getoption("--slow-minutes")
    if "slow" in item.keywords and time.monotonic() > _START + 60 * minutes:
        pytest.skip(f"not started in the {minutes:g} minutes of --slow-minutes")


def pytest_runtest_logstart(nodeid: str) -> None:
    _RUNNING.add(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _RUNNING.discard(nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tests that an interruption has ended."""
    for nodeid in sorted(_RUNNING):
        terminalreporter.write_line(f"INTERRUPTED {nodeid}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Exit with status 2, and not 1, if the workers of pytest-xdist collect different tests.

    After status 1, `make test-all` repeats the failed tests, and without one, all tests.
    """
    if report.failed and report.nodeid.startswith("gw"):
        pytest.exit(str(report.longrepr), returncode=2)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Device type of the tests marked cuda, which are skipped without a GPU."""
    name = str(request.config.getoption("--accelerator"))
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device; --accelerator cpu rehearses the test on the CPU")
    return name


@pytest.fixture(autouse=True)
def _reset_recorded_values() -> None:
    """Redact only the values of variables that the test itself uses."""
    redaction._VALUES = redaction.RecordedValues()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a directory with code.arrow, prose.arrow and data.arrow."""
    root = tmp_path_factory.mktemp("corpus")
    rows = [
        json.loads(line)
        for line in (REPOSITORY / "tests/data/corpus.jsonl").read_text().splitlines()
    ]
    for source in ("code", "prose", "data"):
        texts = [row["text"] for row in rows if row["source"] == source]
        table = pa.table({"text": texts, "source": [source] * len(texts)})
        with (
            pa.OSFile(str(root / f"{source}.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)
        path = root / f"{source}.arrow"
        row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    return root


@pytest.fixture(scope="session")
def small(corpus: Path) -> list[str]:
    """Return overrides for a run of 20 steps on the frozen corpus, of about a second."""
    return [
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.intermediate_size=176",
        "batch.global_batch_size=8",
        "batch.micro_batch_size=4",
        "batch.sequence_length=64",
        f"data.root={corpus}",
        *(f"data.sources.{source}.paths=[{source}.arrow]" for source in ("code", "prose", "data")),
        "data.heldout_documents=8",
        "data.workers=0",
        "evaluation.sequences_per_source=2",
        "schedule.total_steps=20",
        "schedule.warmup_steps=5",
        "checkpoint.every_steps=5",
    ]


@pytest.fixture(scope="session")
def compose() -> Callable[..., DictConfig]:
    """Compose a configuration from overrides, as the command line does."""

    def composed(*overrides: str) -> DictConfig:
        composition.register_configs()
        with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
            return hydra_compose("config", list(overrides))

    return composed


@pytest.fixture
def without_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty PNG files, because rasterization is slow."""
    monkeypatch.setattr("hlat.figures.report_figure.ReportFigure.render_png", lambda _: b"")


@pytest.fixture
def hlat(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run `python -m hlat.<entry>` in a temporary directory."""

    def run(entry: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", f"hlat.{entry}", *arguments]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


@pytest.fixture(autouse=True)
def restore_environment() -> Iterator[None]:
    """Restore the environment variables that a command in this process has set."""
    with mock.patch.dict(os.environ):
        yield
