"""Write the table of families and tested features in docs/models.md from test results.

A test contributes to the table if it records the properties `family` and `column` with pytest's
record_property; a test of several features records `column` several times. Usage:
`python docs/generate_family_table.py` runs the tests, which takes about four minutes.
`python docs/generate_family_table.py REPORT.xml ...` reads JUnit reports of earlier runs instead.
"""

import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from hlat.model.families import FAMILY_NAMES  # noqa: E402

PAGE = REPOSITORY / "docs/models.md"
START, END = "<!-- family table -->\n", "<!-- end of family table -->\n"
COLUMNS = (
    *("logits", "loss", "gradients", "generation", "TP", "PP", "ZeRO"),
    *("export", "import"),
)
"""Columns of the table, values of the recorded property."""
TESTS = (
    "tests/contract/test_families.py",
    "tests/distributed/test_families.py",
    "tests/run/test_family_round_trip.py",
)
PYTEST_ARGUMENTS = ("-m", "slow or not slow")


@dataclass
class FamilyResults:
    """Numbers of passed and of executed tests by family and column; skipped tests do not count."""

    passed: Counter[tuple[str, str]] = field(default_factory=Counter)
    executed: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_passed: int = 0
    num_executed: int = 0

    def add_report(self, report: Path) -> None:
        """Add the test cases of a JUnit report."""
        root = ElementTree.parse(report).getroot()  # noqa: S314  written by pytest
        for case in root.iter("testcase"):
            properties = [(p.get("name"), p.get("value")) for p in case.iter("property")]
            families = [value for name, value in properties if name == "family" and value]
            columns = {value for name, value in properties if name == "column" and value}
            if not families or not columns or case.find("skipped") is not None:
                continue
            is_passed = case.find("failure") is None and case.find("error") is None
            self.num_executed += 1
            self.num_passed += is_passed
            for column in columns:
                self.executed[families[0], column] += 1
                self.passed[families[0], column] += is_passed


def format_table(results: FamilyResults, families: Sequence[str] = FAMILY_NAMES) -> str:
    """Return the Markdown table of passed and executed tests."""

    def format_cell(key: tuple[str, str]) -> str:
        if not results.executed[key]:
            return "not tested"
        return f"{results.passed[key]}/{results.executed[key]} passed"

    rows = [
        ["family", *COLUMNS],
        ["---"] * (len(COLUMNS) + 1),
        *(
            [f"`{family}`", *(format_cell((family, column)) for column in COLUMNS)]
            for family in families
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def run_tests(report: Path) -> None:
    """Run the tests of all families and write a JUnit report."""
    junit = ("-o", "junit_family=xunit1", f"--junitxml={report}")  # xunit2 has no properties
    command = [sys.executable, "-m", "pytest", *PYTEST_ARGUMENTS, *TESTS, *junit]
    print(shlex.join(command), flush=True)
    subprocess.run(command, cwd=REPOSITORY)


def replace_table(page: str, text: str) -> str:
    """Return a page with another text between the marks of the table."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{text}{END}{after}"


def build_section(results: FamilyResults) -> str:
    """Return the table with its heading and the versions of the libraries."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    command = shlex.join(["pytest", *PYTEST_ARGUMENTS, *TESTS])
    return (
        f"\nPassed and executed tests of each family with {versions} on CPUs, written by "
        "`python docs/generate_family_table.py`:\n\n"
        f"{format_table(results)}\n"
        f"Command: `{command}`; {results.num_passed} of {results.num_executed} tests passed. "
        "A test can count in several columns.\n\n"
    )


def main(arguments: Iterable[str]) -> int:
    """Write the table; return 1 if a test failed or a cell has no test."""
    results = FamilyResults()
    with tempfile.TemporaryDirectory() as directory:
        reports = [Path(argument) for argument in arguments]
        if not reports:
            reports = [Path(directory) / "report.xml"]
            run_tests(reports[0])
        for report in reports:
            results.add_report(report)
    PAGE.write_text(replace_table(PAGE.read_text(), build_section(results)))
    print(format_table(results), end="")
    print(f"{results.num_passed} of {results.num_executed} tests passed")
    is_complete = all(results.passed[f, c] for f in FAMILY_NAMES for c in COLUMNS)
    return 0 if is_complete and results.num_passed == results.num_executed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
