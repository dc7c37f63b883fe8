"""Groups have the same name in conf, schema and code; fields have docstrings; no group names code."""

import ast
import dataclasses
import typing
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.package_dirs import find_package_dir
from hlat.config.run import Config

REPOSITORY = Path(__file__).resolve().parent.parent.parent
GROUPS = [
    field.name
    for field in dataclasses.fields(Config)
    if dataclasses.is_dataclass(typing.get_type_hints(Config)[field.name]) and field.name != "run"
]
YAMLS = sorted([*(REPOSITORY / "conf").rglob("*.yaml"), *(REPOSITORY / "sweeps").rglob("*.yaml")])


CODE = {
    "batch": "config",  # sizes only: code reads them from the schema
    "compiler": "engine/neuron",
    "evaluation": "evaluate",
    "hardware": "config/mfu.py",
    "optimizer": "optim",
    "parallelism": "distributed",
    "phase": "config/phase_steps.py",
    "profiler": "engine/step_profiler.py",
    "schedule": "optim/lr_schedule.py",
}
"""Code of the groups whose package has the name of a command or a term of the field."""


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_in_conf_schema_and_code(group: str) -> None:
    assert any((REPOSITORY / "conf" / group).glob("*.yaml"))
    assert (REPOSITORY / "hlat/config" / f"{group}.py").is_file()
    assert (REPOSITORY / "hlat" / CODE.get(group, group)).exists()


def test_conf_contains_groups_and_experiments_only() -> None:
    folders = {path.name for path in (REPOSITORY / "conf").iterdir() if path.is_dir()} - {
        "__pycache__",
        "hydra",  # text of --help
    }
    assert folders == {*GROUPS, "experiment", "parametrization"}, "the latter is a part of model"


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "hlat/config").glob("*.py")), ids=lambda file: file.stem
)
def test_every_field_has_a_docstring(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.decorator_list and node.name != "Config":
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign):
                    has_doc = isinstance(following, ast.Expr) and isinstance(
                        following.value, ast.Constant
                    )
                    assert has_doc, f"{file.name}: {node.name}.{ast.unparse(statement.target)}"


@pytest.mark.parametrize("file", YAMLS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_configuration_names_code_to_run(file: Path) -> None:
    assert "_target_" not in file.read_text()


@pytest.mark.slow  # composes all choices; test_configs.py has models and experiments
@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_choice_of_a_group_fits_its_schema(
    field: "dataclasses.Field[typing.Any]", compose
) -> None:
    if field.name not in GROUPS:
        return
    for file in sorted((find_package_dir("conf") / field.name).glob("*.yaml")):
        section = compose(f"{field.name}={file.stem}")[field.name]
        assert OmegaConf.get_type(section) is typing.get_type_hints(Config)[field.name]
        requires_values = "???" in file.read_text()
        assert requires_values or not OmegaConf.missing_keys(section), file


@pytest.mark.slow
def test_hardware_prices_are_dated_and_figures_cited(compose) -> None:
    for file in sorted((find_package_dir("conf") / "hardware").glob("*.yaml")):
        hardware = compose(f"hardware={file.stem}").hardware
        assert (hardware.price_usd_per_hour is None) == (hardware.price_date is None), file
        assert hardware.source or not hardware.peak_tflops, file
