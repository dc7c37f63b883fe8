"""What the documents promise exists: commands compose, links lead somewhere, folders are named."""

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from omegaconf import OmegaConf

from hlat import __main__ as hlat_main
from hlat.config.config_validation import VALIDATORS

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "sweeps").glob("*.md"),
        *(REPOSITORY / "benchmarks").rglob("*.md"),
        *(REPOSITORY / "tests").rglob("*.md"),
    ]
)
BLOCK = re.compile(r"^ *```(?:bash|sh)?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def _commands(prefix: str) -> list[tuple[str, str]]:
    """Return the (document, command) pairs of all code blocks whose command has a prefix."""
    found = []
    for document in DOCUMENTS:
        for block in BLOCK.findall(document.read_text()):
            for line in block.splitlines():
                command = line.strip().split("  #")[0].strip()
                if command.startswith(prefix):
                    found.append((str(document.relative_to(REPOSITORY)), command))
    return found


def test_the_readme_begins_with_the_two_commands() -> None:
    first = BLOCK.search((REPOSITORY / "README.md").read_text())
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].strip().splitlines()] == [
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
    *_commands("python -m hlat.train"),
    *_commands("hlat train"),
    *_commands("hlat sweep"),
    *_commands("hlat precompile"),
]


@pytest.mark.parametrize(("document", "command"), TRAINING_COMMANDS)
def test_training_commands_compose(document: str, command: str, compose) -> None:
    words = shlex.split(command)
    overrides = [word for word in words if "=" in word and not word.startswith("hydra")]
    overrides = [re.sub(r"=.*interval\(([^,]+),.*", r"=\1", word) for word in overrides]
    first_point = [word.split(",")[0] if "[" not in word else word for word in overrides]
    config = OmegaConf.to_object(compose(*first_point))
    problems = [problem for rule in VALIDATORS for problem in rule(config)]
    # A command may need hardware or an engine that is not here, but its numbers must agree
    elsewhere = ("cannot be executed by this version", "needs a multiple of")
    assert not [p for p in problems if not any(words in p for words in elsewhere)], document


@pytest.mark.parametrize(("document", "command"), _commands("hlat "))
def test_commands_exist(document: str, command: str) -> None:
    words = shlex.split(command)
    known = hlat_main.main.list_commands(click.Context(hlat_main.main))
    assert words[1] in {*known, "--help"}, document


@pytest.mark.parametrize(("document", "command"), _commands("python -m hlat."))
def test_entries_exist(document: str, command: str) -> None:
    module = shlex.split(command)[2]
    path = REPOSITORY / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__main__.py")
    assert any(file.is_file() for file in files), f"{document}: {command}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_internal_links_lead_somewhere(document: Path) -> None:
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


def test_every_decision_is_listed() -> None:
    index = (REPOSITORY / "docs/adr/README.md").read_text()
    for record in (REPOSITORY / "docs/adr").glob("0*.md"):
        assert record.name in index
