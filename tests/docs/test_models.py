"""docs/models.md has every setting of components, every family, and a result for each feature."""

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hlat.config.model import ModelConfig
from hlat.model.families import FAMILIES, FAMILY_NAMES
from tests.distributed.test_families import COLUMNS as LAYOUTS

REPOSITORY = Path(__file__).resolve().parent.parent.parent
REPORT = """<testsuites><testsuite>
<testcase><properties><property name="family" value="qwen3"/><property name="column" value="TP"/>
</properties></testcase>
<testcase><properties><property name="family" value="qwen3"/><property name="column" value="TP"/>
<property name="column" value="PP"/></properties><failure>1 != 2</failure></testcase>
<testcase><properties><property name="family" value="qwen3"/><property name="column" value="ZeRO"/>
</properties><skipped/></testcase>
<testcase/>
</testsuite></testsuites>"""


def _load_generator() -> ModuleType:
    path = REPOSITORY / "docs/generate_family_table.py"
    spec = importlib.util.spec_from_file_location("generate_family_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = _load_generator()


def _read_table() -> dict[tuple[str, str], str]:
    """Return the cells of the committed table by family and column."""
    section = GENERATOR.PAGE.read_text().split(GENERATOR.START)[1].split(GENERATOR.END)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    header, _, *body = rows
    return {
        (row[0].strip("`"), column): cell
        for row in body
        for column, cell in zip(header[1:], row[1:], strict=True)
    }


def _list_component_keys() -> list[str]:
    """Return the keys of all components, without `model.`."""

    def list_keys(section: object, path: str = "") -> Iterator[str]:
        for item in dataclasses.fields(section):
            value = getattr(section, item.name)
            if dataclasses.is_dataclass(value):
                yield from list_keys(value, f"{path}{item.name}.")
            elif path:
                yield f"{path}{item.name}"

    return [*list_keys(ModelConfig())]


@pytest.mark.parametrize("key", _list_component_keys())
def test_every_key_of_a_component_is_described(key: str) -> None:
    names = {key.removeprefix(prefix) for prefix in ("", "attention.", "rope.", "mlp.moe.")}
    cells = re.findall(r"^\| (`.*?) \|", GENERATOR.PAGE.read_text(), re.MULTILINE)
    assert names & {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_is_described(family: str) -> None:
    row = f"| `{family}` | `{FAMILIES[family].model_type}` |"
    assert row in GENERATOR.PAGE.read_text()
    assert (REPOSITORY / f"conf/model/{family}_tiny.yaml").is_file()


def test_table_has_every_family_and_column() -> None:
    keys = {(family, column) for family in FAMILY_NAMES for column in GENERATOR.COLUMNS}
    assert _read_table().keys() == keys


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_cells_of_a_family_have_results(family: str) -> None:
    cells = {column: cell for (name, column), cell in _read_table().items() if name == family}
    counts = {column: re.fullmatch(r"(\d+)/(\d+) passed", cell) for column, cell in cells.items()}
    assert [column for column, match in counts.items() if not match or match[1] != match[2]] == []
    for column, layouts in LAYOUTS.items():
        match = counts[column]
        assert match is not None
        assert match[2] == str(len(layouts)), "run: python docs/generate_family_table.py"


def test_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    results = GENERATOR.FamilyResults()
    results.add_report(report)
    assert (results.num_passed, results.num_executed) == (1, 2)
    row = GENERATOR.format_table(results, ["qwen3"]).splitlines()[-1]
    cells = row.strip("| ").split(" | ")[1:]
    found = dict(zip(GENERATOR.COLUMNS, cells, strict=True))
    assert (found["TP"], found["PP"], found["ZeRO"]) == ("1/2 passed", "0/1 passed", "not tested")


def test_only_the_table_is_replaced() -> None:
    page = f"before\n{GENERATOR.START}old\n{GENERATOR.END}after\n"
    expected = f"before\n{GENERATOR.START}new\n{GENERATOR.END}after\n"
    assert GENERATOR.replace_table(page, "new\n") == expected
