"""Imports only go down and form no cycles, and libraries are imported only where they belong; lazy
imports count."""

import ast
import functools
import re
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LAYERS = {
    "config": 0,
    **dict.fromkeys(("storage", "distributed"), 1),
    **dict.fromkeys(("model", "precision", "optim", "data", "tracking"), 2),
    **dict.fromkeys(("engine", "study"), 3),
    **dict.fromkeys(("prepare", "evaluate", "jobs", "report", "recovery", "doctor"), 4),
    **dict.fromkeys(("checkpoint", "figures", "inference", "plan"), 4),
    **dict.fromkeys(("__main__", "train", "average", "export", "precompile", "api"), 5),
}
ENTRIES = {name for name, layer in LAYERS.items() if layer == 5}
FENCES = {
    "torch": {
        *("model", "optim", "precision", "engine", "checkpoint", "doctor"),
        *("distributed.device_mesh", "distributed.mesh_axis", "distributed.mesh_object_group"),
        "distributed.process_groups",
        *("recovery.node_logs", "recovery.rendezvous"),
        *("recovery.supervisor", "recovery.worker_agent"),
    },
    "torch_xla": {"engine.nxd"},
    "neuronx_distributed": {"engine.nxd"},
    "fsspec": {"prepare", "storage"},
    "pyarrow": {"api", "data", "prepare", "study"},
    "tokenizers": {"data", "prepare"},
    "gigatoken": {"data"},
    "datasketch": {"prepare"},
    "py3langid": {"prepare"},
    "safetensors": {"checkpoint", "model"},
    "cryptography": {"checkpoint"},
    "wandb": {"tracking"},
    "wandb_workspaces": {"tracking"},
    "tensorboard": {"tracking"},
    "matplotlib": {"figures", "plan", "report"},
    "jinja2": {"figures", "inference"},
    "starlette": {"inference"},
    "uvicorn": {"inference"},
    "scipy": {"plan", "study"},
    "lightgbm": {"study"},
    "click": {"__main__"},
    "hydra": {"config", *ENTRIES},  # and every __main__
    "omegaconf": {"config", "jobs.cluster", *ENTRIES},
    "orjson": {"report", "study"},
    "psutil": {"recovery", "tracking"},
    "yaml": {"config"},
    "lm_eval": {"evaluate"},
    "datasets": {"evaluate"},
    "tqdm": {"data", "prepare", "storage", "tracking", "evaluate"},
}
SPECS = re.compile(r".*_spec|model\.families(\..*)?|model\.computation_settings")
"""Modules of `model` and `optim` without torch, which configuration and planner use. They have the
layer of `config` and count as part of it (ADR 0041)."""
PURE = {name for name, layer in LAYERS.items() if layer < 2} - {"storage"}


def _modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name below `hlat`."""
    package = REPOSITORY / "hlat"
    names = {
        file: file.relative_to(package).with_suffix("").as_posix() for file in package.rglob("*.py")
    }
    return {name.replace("/__init__", "").replace("/", "."): file for file, name in names.items()}


MODULES = _modules()


def _layer(module: str) -> int:
    """Return the layer of a module; every `__main__` is an entry."""
    if module.endswith(".__main__"):
        return 5
    return 0 if SPECS.fullmatch(module) else LAYERS[module.partition(".")[0]]


@functools.cache
def _imports(file: Path, relative: bool = False, types: bool = False) -> set[str]:
    """Return the dotted names of all imports of a file, also in functions.

    If `relative` is set, omit relative imports; unless `types` is set, those under TYPE_CHECKING.
    """
    names = set()
    tree = ast.parse(file.read_text())
    only_for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in only_for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (relative and node.level):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _internal(imports: set[str]) -> set[str]:
    """Return the modules of this package among the imports."""
    below = {name.removeprefix("hlat.") for name in imports if name.startswith("hlat.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in below} - {""}


def _package(module: str) -> str:
    """Return the package or top-level module of a module."""
    return "config" if SPECS.fullmatch(module) else module.partition(".")[0]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_only_go_down(module: str) -> None:
    if module == "__init__":
        assert not _internal(_imports(MODULES[module]))
        return
    for imported in _internal(_imports(MODULES[module])):
        package = imported.partition(".")[0]
        assert package in LAYERS, f"hlat/{package} has no layer; add it to LAYERS"
        lower, upper = _layer(imported), _layer(module)
        assert lower <= upper, f"{module} imports {imported}, which is in a higher layer"
        assert not (lower == upper == 5), f"entry {module} imports entry {imported}"


def _find_cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_cycle_is_found() -> None:
    assert _find_cycle({"data": {"checkpoint"}, "checkpoint": {"data"}})
    assert not _find_cycle({"data": {"storage"}, "checkpoint": {"storage", "data"}})


def test_no_cycles_between_modules() -> None:
    cycle = _find_cycle({name: _internal(_imports(file)) for name, file in MODULES.items()})
    assert not cycle, f"import cycle: {' -> '.join(cycle)}"


def test_no_cycles_between_packages() -> None:
    """Check all imports of all modules, `__main__` and imports for type checking included."""
    graph = defaultdict(set)
    for module, file in MODULES.items():
        imported = {_package(name) for name in _internal(_imports(file, types=True))}
        graph[_package(module)] |= imported - {_package(module)}
    cycle = _find_cycle(graph)
    assert not cycle, f"packages import each other: {' -> '.join(cycle)}"


def test_engines_do_not_import_each_other() -> None:
    for module, file in MODULES.items():
        for one, other in (("engine.native", "engine.nxd"), ("engine.nxd", "engine.native")):
            if module.startswith(one):
                assert not any(name.startswith(other) for name in _internal(_imports(file)))


@pytest.mark.parametrize("library", sorted(FENCES))
def test_library_is_imported_only_where_allowed(library: str) -> None:
    for module, file in MODULES.items():
        uses = any(name.split(".")[0] == library for name in _imports(file))
        is_entry = module.endswith("__main__") and FENCES[library] >= ENTRIES
        names = FENCES[library]
        is_pure = SPECS.fullmatch(module) and library == "torch"
        allowed = not is_pure and (
            is_entry or any(module == n or module.startswith(f"{n}.") for n in names)
        )
        assert allowed or not uses, (
            f"{module} imports {library}, which belongs in {sorted(FENCES[library])}"
        )


def test_every_external_library_is_restricted_or_numpy() -> None:
    for module, file in MODULES.items():
        imports = (
            {name.split(".")[0] for name in _imports(file)}
            - set(sys.stdlib_module_names)
            - {"hlat"}
        )
        assert imports <= {"numpy", *FENCES}, module


def test_pure_modules_need_nothing_but_numpy_and_the_configuration() -> None:
    for module, file in MODULES.items():
        if module.partition(".")[0] in PURE - {"config"} and module not in FENCES["torch"]:
            imports = {name.split(".")[0] for name in _imports(file)} - set(sys.stdlib_module_names)
            assert imports <= {"hlat", "numpy"}, module
            assert not _internal(_imports(file)) & FENCES["torch"], module


def test_launchers_need_no_torch() -> None:
    for file in (REPOSITORY / "launchers").rglob("*.py"):
        names = {name.split(".")[0] for name in _imports(file, relative=True)}
        allowed = {"hydra", "omegaconf", "hlat", "jinja2", "optuna", "submitit", "yaml"}
        assert names - set(sys.stdlib_module_names) <= allowed, file


def test_model_does_not_depend_on_processes() -> None:
    for file in (REPOSITORY / "hlat/model").glob("*.py"):
        for name in _imports(file):
            assert not re.search(r"distributed|engine", name), f"{file}: {name}"


def test_no_code_names_an_accelerators_library() -> None:
    """Check that the device is from torch or the configuration; only presets name vendors."""
    for file in MODULES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            assert text != "cuda", f"{file}:{getattr(node, 'lineno', 0)} names cuda"


def test_one_module_creates_process_groups() -> None:
    """Check that no other module can create groups in another order than its peers."""
    creators = re.compile(r"_?new_(sub)?group\w*|split_group|init_device_mesh|DeviceMesh")
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            function = node.func if isinstance(node, ast.Call) else None
            name = getattr(function, "attr", getattr(function, "id", ""))
            assert module == "distributed.process_groups" or not creators.fullmatch(name), (
                f"{file}:{getattr(node, 'lineno', 0)} calls {name}; use create_axes of "
                "hlat/distributed/process_groups.py"
            )
