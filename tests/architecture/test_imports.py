"""Imports only go down, libraries stay behind their fences, nothing goes in circles; lazy imports
count."""

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LAYERS = {
    "config": 0,
    **dict.fromkeys(
        (
            *("parallelism", "precision", "phase", "schedule", "compiler", "compiler_cache"),
            *("hardware", "state"),
        ),
        1,
    ),
    **dict.fromkeys(("model", "optimizer", "data", "checkpoint", "tracking", "planning"), 2),
    "engine": 3,
    **dict.fromkeys(("evaluation", "jobs", "reporting", "recovery", "diagnosis"), 4),
    **dict.fromkeys(
        (
            "train",
            "plan",
            "doctor",
            "evaluate",
            "average",
            "export",
            "report",
            "prepare",
            "precompile",
            "cluster",
        ),
        5,
    ),
}
ENTRIES = {room for room, layer in LAYERS.items() if layer == 5}
FENCES = {
    "torch": {
        *("model", "optimizer", "engine", "checkpoint", "diagnosis"),
        *("recovery.supervisor", "recovery.rendezvous"),
    },
    "torch_xla": {"engine.nxd"},
    "neuronx_distributed": {"engine.nxd"},
    "fsspec": {"data", "checkpoint"},
    "pyarrow": {"data"},
    "tokenizers": {"data"},
    "gigatoken": {"data"},
    "safetensors": {"checkpoint", "model"},
    "wandb": {"tracking"},
    "wandb_workspaces": {"tracking"},
    "tensorboard": {"tracking"},
    "matplotlib": {"reporting"},
    "hydra": {"config", *ENTRIES},
    "omegaconf": {"config", *ENTRIES},
    "orjson": {"reporting"},
    "lm_eval": {"evaluation"},
    "datasets": {"evaluation"},
    "tqdm": {"data", "tracking", "evaluation"},
}
PURE = {room for room, layer in LAYERS.items() if layer < 2}


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `hlat`."""
    package = REPOSITORY / "hlat"
    names = {
        file: file.relative_to(package).with_suffix("").as_posix() for file in package.rglob("*.py")
    }
    return {name.replace("/__init__", "").replace("/", "."): file for file, name in names.items()}


MODULES = _modules()


def _layer(module: str) -> int:
    """A room's `__main__` is an entry, wherever it lies."""
    return 5 if module.endswith(".__main__") else LAYERS[module.partition(".")[0]]


def _imports(file: Path, relative: bool = False) -> set[str]:
    """Dotted names of everything a file imports, in functions too, but not what only a type checker
    sees, nor relative ones where they are allowed."""
    found = set()
    tree = ast.parse(file.read_text())
    only_for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in only_for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (relative and node.level):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _own(imports: set[str]) -> set[str]:
    """The modules of this package among them."""
    below = {name.removeprefix("hlat.") for name in imports if name.startswith("hlat.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in below} - {""}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_only_go_down(module: str) -> None:
    room = module.partition(".")[0]
    if room in ("", "__init__"):
        assert not _own(_imports(MODULES[module]))
        return
    for imported in _own(_imports(MODULES[module])):
        other = imported.partition(".")[0]
        assert other in LAYERS, f"hlat/{other} has no layer; docs/design.md names the rooms"
        lower, upper = _layer(imported), _layer(module)
        assert lower <= upper, f"{module} imports {imported}, which lies above it"
        assert not (lower == upper == 5), f"entry {module} imports entry {imported}"


def test_the_engines_never_meet() -> None:
    for module, file in MODULES.items():
        for one, other in (("engine.native", "engine.nxd"), ("engine.nxd", "engine.native")):
            if module.startswith(one):
                assert not any(name.startswith(other) for name in _own(_imports(file)))


def test_no_cycles() -> None:
    graph = {module: _own(_imports(file)) for module, file in MODULES.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("library", sorted(FENCES))
def test_library_stays_behind_its_fence(library: str) -> None:
    for module, file in MODULES.items():
        uses = any(name.split(".")[0] == library for name in _imports(file))
        allowed = any(module == room or module.startswith(f"{room}.") for room in FENCES[library])
        assert allowed or not uses, (
            f"{module} imports {library}, which belongs in {sorted(FENCES[library])}"
        )


def test_every_foreign_library_has_a_fence_or_is_numpy() -> None:
    for module, file in MODULES.items():
        foreign = (
            {name.split(".")[0] for name in _imports(file)}
            - set(sys.stdlib_module_names)
            - {"hlat"}
        )
        assert foreign <= {"numpy", *FENCES}, module


def test_pure_modules_need_nothing_but_numpy_and_the_configuration() -> None:
    for module, file in MODULES.items():
        if module.partition(".")[0] in PURE - {"config"}:
            foreign = {name.split(".")[0] for name in _imports(file)} - set(sys.stdlib_module_names)
            assert foreign <= {"hlat", "numpy"}, module


def test_launchers_need_no_torch() -> None:
    for file in (REPOSITORY / "launchers").glob("*.py"):
        names = {name.split(".")[0] for name in _imports(file, relative=True)}
        allowed = {"hydra", "omegaconf", "hlat", "optuna", "submitit", "yaml"}
        assert names - set(sys.stdlib_module_names) <= allowed, file


def test_model_knows_nothing_of_processes() -> None:
    for file in (REPOSITORY / "hlat/model").glob("*.py"):
        for name in _imports(file):
            assert not re.search(r"distributed|engine", name), f"{file}: {name}"


def test_no_code_names_an_accelerators_library() -> None:
    """The device is torch's answer or the configuration's word; only the hardware presets name
    vendors."""
    for file in MODULES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            assert text != "cuda", f"{file}:{getattr(node, 'lineno', 0)} names cuda"
