"""Documents are consistent with the code: commands compose, link targets and paths exist."""

import ast
import builtins
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from hlat import __main__ as hlat_main
from tests.support.document_commands import (
    REPOSITORY,
    find_config_problems,
    find_shell_blocks,
    list_commands,
)

DOCUMENTS = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "sweeps").glob("*.md"),
        *(REPOSITORY / "benchmarks").rglob("*.md"),
        *(REPOSITORY / "tests").rglob("*.md"),
    ]
)


def _commands(*prefixes: str) -> list[tuple[str, str]]:
    """Return the (document, command) pairs of all commands with a prefix in code blocks."""
    return [
        (str(document.relative_to(REPOSITORY)), command)
        for document in DOCUMENTS
        for block in find_shell_blocks(document)
        for command in list_commands(block)
        if command.startswith(prefixes)
    ]


def test_the_readme_begins_with_the_two_commands() -> None:
    assert list_commands(find_shell_blocks(REPOSITORY / "README.md")[0]) == [
        "make train",
        "make test",
    ]


@pytest.mark.parametrize("command", sorted({command for _, command in _commands("make ")}))
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *shlex.split(command)[1:]],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"


TRAINING_COMMANDS = [
    pytest.param(document, command, marks=[] if document == "README.md" else [pytest.mark.slow])
    for document, command in _commands(
        "python -m hlat.train", "hlat train", "hlat sweep", "hlat precompile"
    )
    if not document.startswith("docs/guides/")  # tests/docs/test_guides.py runs these
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the domains of docs/data.md in data/corpus."""
    folder = tmp_path_factory.mktemp("documents")
    for domain in ("wiki", "code"):
        (folder / "data/corpus" / domain).mkdir(parents=True)
        (folder / "data/corpus" / domain / "part.arrow").write_bytes(b"x")
    return folder


@pytest.mark.parametrize(("document", "command"), TRAINING_COMMANDS)
def test_training_commands_compose(document: str, command: str, compose, directory: Path) -> None:
    command = command.replace("$PWD", str(directory))
    assert not find_config_problems(command, compose), document


@pytest.mark.parametrize(("document", "command"), _commands("hlat "))
def test_commands_exist(document: str, command: str) -> None:
    arguments = shlex.split(command)
    known = hlat_main.main.list_commands(click.Context(hlat_main.main))
    assert arguments[1] in {*known, "--help"}, document


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_targets_of_internal_links_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_the_readmes_tree_names_every_folder() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    for path in sorted(REPOSITORY.iterdir()):
        if (
            path.is_dir()
            and not path.name.startswith(".")
            and path.name not in {"runs", "build", "dist", "hlat.egg-info"}
        ):
            assert re.search(rf"^ *{re.escape(path.name)}/ +\S", readme, re.MULTILINE), path.name
    for path in sorted((REPOSITORY / "hlat").iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            assert re.search(rf"^ +{re.escape(path.name)}/ +\S", readme, re.MULTILINE), (
                f"hlat/{path.name}"
            )


RECORDS = sorted((REPOSITORY / "docs/adr").glob("0*.md"))
RECORD_PATH = re.compile(r"`((?:conf|docs|hlat|launchers|tests)/[^`\s]*)`")


def _get_status(record: Path) -> str:
    status = re.search(r"^\*\*Status\.\*\* (.+)\.$", record.read_text(), re.MULTILINE)
    assert status is not None, record.name
    return status[1]


def test_the_index_has_title_and_status_of_every_record() -> None:
    index = (REPOSITORY / "docs/adr/README.md").read_text()
    for record in RECORDS:
        number, title = record.read_text().split("\n", 1)[0].removeprefix("# ").split(": ", 1)
        assert f"| [{number}]({record.name}) | {title} | {_get_status(record)} |" in index


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_records_have_all_parts(record: Path) -> None:
    parts = re.findall(r"^\*\*(\w+)\.\*\*", record.read_text(), re.MULTILINE)
    required = ("Status", "Context", "Options", "Decision", "Consequences")
    assert [part for part in parts if part in required] == [*required]
    assert {*parts} - {*required} <= {"Measurement"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_status_of_a_record_names_existing_records(record: Path) -> None:
    status = _get_status(record)
    if status != "Accepted":
        assert re.fullmatch(r"(Superseded|Amended) by \d{4}(, \d{4})*", status)
    other_numbers = {path.name[:4] for path in RECORDS} - {record.name[:4]}
    assert {*re.findall(r"\d{4}", status)} <= other_numbers


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_paths_in_records_exist(record: Path) -> None:
    for path in RECORD_PATH.findall(record.read_text()):
        assert (REPOSITORY / path).exists(), path


LOG_ENTRIES = re.split(r"^## ", (REPOSITORY / "docs/log.md").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("entry", LOG_ENTRIES, ids=lambda entry: entry.split("\n", 1)[0])
def test_log_entries_have_all_parts(entry: str) -> None:
    assert re.match(r"\d{4}-\d{2}-\d{2}: \S", entry)
    parts = re.findall(r"^\*\*(\w+)\.\*\*", entry, re.MULTILINE)
    assert parts == ["Question", "Method", "Result", "Conclusion"]


def test_the_newest_log_entry_is_first() -> None:
    dates = [entry[:10] for entry in LOG_ENTRIES]
    assert dates == sorted(dates, reverse=True)


RENAMES = (REPOSITORY / "docs/renames.md").read_text()
CURRENT_NAMES = sorted(
    {
        name
        for row in re.findall(r"^\| `.*\| (.*) \|$", RENAMES, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
)


def _find_module(name: str) -> Path | None:
    """Return the file or directory of a module of hlat or of the launchers."""
    path = REPOSITORY / name.replace("hydra_plugins.hlat_launchers", "launchers").replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py", path)
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _names_of(node: ast.AST) -> set[str]:
    """Return the names that a class, function or assignment defines."""
    targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
    return {getattr(node, "name", ""), *(getattr(target, "id", "") for target in targets)} - {""}


def _defines(tree: ast.AST, names: list[str]) -> bool:
    """Return True if `tree` defines the first name, and its body the next one, and so on."""
    if not names:
        return True
    return any(
        names[0] in _names_of(node) and _defines(node, names[1:])
        for node in ast.iter_child_nodes(tree)
    )


def _exists(name: str) -> bool:
    """Return True if `name` is a file, a module, a class, a member of one, or a builtin."""
    if "/" in name:
        return (REPOSITORY / name).exists()
    if hasattr(builtins, name) or _find_module(name):
        return True
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (module := _find_module(".".join(parts[:end]))) and module.is_file():
            return _defines(ast.parse(module.read_text()), parts[end:])
    return False


ENGINE_MEMBERS = re.findall(
    r"`(\w+)` \|$", RENAMES.split("members of the engine interface\n")[1], re.MULTILINE
)


def test_renames_list_existing_names() -> None:
    assert len(CURRENT_NAMES) > 300
    names = [name for name in CURRENT_NAMES if name not in ENGINE_MEMBERS]
    assert [name for name in names if not _exists(name)] == []


def test_renames_list_existing_members_of_the_engine_interface() -> None:
    tree = ast.parse((REPOSITORY / "hlat/engine/interface.py").read_text())
    defined = {name for node in ast.walk(tree) for name in _names_of(node)}
    assert ENGINE_MEMBERS
    assert {*ENGINE_MEMBERS} <= defined


def test_the_changelog_lists_renames_that_exist() -> None:
    section = (REPOSITORY / "CHANGELOG.md").read_text().split("#### Renamed\n")[1].split("\n#")[0]
    rows = re.findall(
        r"^\| (?:packages|modules|classes|_target_.*|) ?\| .* \| (.*) \|$", section, re.M
    )
    names = [name for row in rows for name in re.findall(r"`((?:hlat|hydra_plugins)\.[^`]+)`", row)]
    assert len(names) > 10
    assert [name for name in names if not _exists(name)] == []
