"""Compile the graphs of a configuration before a run trains it: `hlat precompile`.

    compose -> fetch shared graphs -> trace four steps -> compile in parallel -> verify -> share

Graphs depend on what a step computes: model, batch, layout and number of processes, precision,
masks, optimizer and its constants, compiler and its flags. The learning rate, the number of steps,
the seed and the corpus are inputs of the graphs and change none.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from omegaconf import DictConfig

from hlat.config import entry_point, frozen_config
from hlat.config.argument_parser import CommandLineParser, run_command
from hlat.config.config_errors import ConfigError, ExitCode, raise_config_errors
from hlat.config.engine_capabilities import ENGINE_CAPABILITIES
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.engine import graph_extraction
from hlat.engine.neuron import neuron_compile_cache, neuron_environment
from hlat.plan.feasibility import validate_feasibility
from hlat.storage.progress_bar import ProgressBar

_EXAMPLES = """\
hlat precompile OVERRIDE ... compiles the graphs of a configuration on this node; merge and verify
work on the directories in which nodes keep graphs.

examples:
  hlat precompile model=7b engine=nxd hardware=trn1_32xl compiler=neuron_2_28
  srun --nodes=64 --ntasks-per-node=1 hlat precompile experiment=hlat_7b
  hlat precompile verify                   check that every traced graph is compiled
  hlat precompile merge runs/.compiled     copy shared graphs to the cache of this node

The cache of a node is NEURON_COMPILE_CACHE_URL (default: /var/tmp/neuron-compile-cache). Compiled
graphs are shared in <run.root>/.compiled and not compiled again. See docs/precompile.md."""

_TOOL = "neuron_parallel_compile"


def main() -> None:
    """Compile the composed configuration, or merge or verify caches; exit."""
    try:
        if sys.argv[1:] and sys.argv[1] in ("merge", "verify", "-h", "--help"):
            sys.exit(manage_cache(sys.argv[1:]))
        entry_point.run_entry_point(precompile)
    except OSError as error:
        print(f"hlat: {error.filename}: {error.strerror or error}", file=sys.stderr)
        sys.exit(ExitCode.FAILED)


def precompile(composed: DictConfig) -> ExitCode:
    """Trace and compile the composed configuration on this node; return the exit code."""
    if not ENGINE_CAPABILITIES[composed.engine.name].compiles_ahead:
        name, *_ = (engine.value for engine, c in ENGINE_CAPABILITIES.items() if c.compiles_ahead)
        raise ConfigError(
            f"engine.name={composed.engine.name.value} compiles no graphs ahead of a run; set "
            f"engine={name}"
        )
    config = resolve_config(composed)
    validate_feasibility(config)
    if (tool := shutil.which(_TOOL)) is None:
        raise ConfigError(f"{_TOOL} is not on the PATH; activate an environment with torch-neuronx")
    variables = entry_point.get_user_environment() | neuron_environment.build_neuron_environment(
        config.compiler, config.precision
    )
    cache = neuron_compile_cache.get_cache_dir(variables)
    variables["NEURON_COMPILE_CACHE_URL"] = str(cache)
    shared = neuron_compile_cache.get_shared_cache_dir(Path(config.run.root))
    if neuron_compile_cache.list_modules(shared):
        _merge_caches([shared], cache)
    with _build_traced_command(config, composed) as command:
        for name in neuron_compile_cache.remove_incomplete_modules(cache):
            print(f"{name} is incomplete after an earlier attempt and is compiled again")
        if not _run_tool(
            tool, "collect", command, variables | graph_extraction.build_node_environment(config)
        ):
            return ExitCode.FAILED
    compiled = _run_tool(tool, "compile", [], variables)
    code = max(_verify_cache(cache), ExitCode.FINISHED if compiled else ExitCode.FAILED)
    if neuron_compile_cache.list_modules(cache):
        _merge_caches([cache], shared)
    return code


@contextmanager
def _build_traced_command(config: Config, composed: DictConfig) -> Iterator[list[str]]:
    """Yield the command that traces a frozen configuration on this node."""
    with (
        graph_extraction.create_run_root(config) as root,
        tempfile.TemporaryDirectory(prefix="hlat-") as directory,
    ):
        command_line = frozen_config.CommandLine(entry_point.get_task_overrides(), [])
        frozen_config.save_frozen_config(
            Path(directory), composed, command_line, graph_extraction.build_overrides(root)
        )
        yield entry_point.build_frozen_command(sys.executable, Path(directory))


def _run_tool(tool: str, step: str, args: list[str], variables: Mapping[str, str]) -> bool:
    """Run one step of the tool, which prints its own progress; return True if it succeeds."""
    code = subprocess.call([tool, "--command", step, *args], env=variables)
    if code != 0:
        print(f"hlat: {_TOOL} --command {step} exited with {code}", file=sys.stderr)
    return code == 0


def manage_cache(argv: Sequence[str]) -> int:
    """Merge or verify caches; return the exit code."""
    parser = CommandLineParser(
        "precompile", "Compile the graphs of a configuration for trn1.", _EXAMPLES
    )
    add = parser.add_argument
    add("action", choices=("merge", "verify"), help="without an action: compile")
    add("caches", nargs="*", type=Path, metavar="DIR", help="directories of compiled graphs")
    into = "merge: directory to copy to (default: the cache of this node)"
    add("--into", type=Path, metavar="DIR", help=into)
    arguments = parser.parse(argv)
    if arguments.action == "merge" and not arguments.caches:
        parser.error("merge needs one directory or more")
    if arguments.action == "verify" and (arguments.into is not None or len(arguments.caches) > 1):
        parser.error("verify takes one directory and no into=")
    interrupted = "interrupted; the same command continues"
    return run_command(lambda: _manage_cache(arguments), None, interrupted)


def _manage_cache(arguments: argparse.Namespace) -> ExitCode:
    default = neuron_compile_cache.get_cache_dir(os.environ)
    if arguments.action == "merge":
        return _merge_caches(arguments.caches, arguments.into or default)
    return _verify_cache(arguments.caches[0] if arguments.caches else default)


def _merge_caches(sources: list[Path], target: Path) -> ExitCode:
    empty = [source for source in sources if not neuron_compile_cache.list_modules(source)]
    raise_config_errors(f"{source} has no neuronxcc-*/MODULE_*" for source in empty)
    with closing(
        ProgressBar("merging", neuron_compile_cache.compute_merge_bytes(sources, target))
    ) as progress:
        merged = neuron_compile_cache.merge_caches(sources, target, progress.add)
    _print_problems(merged.incomplete)
    print(f"{target}: {len(merged.added)} modules added, {len(merged.present)} already present")
    return ExitCode.FAILED if merged.incomplete else ExitCode.FINISHED


def _verify_cache(cache_dir: Path) -> ExitCode:
    if not cache_dir.is_dir():
        raise ConfigError(f"{cache_dir} is not a directory of compiled graphs")
    found = neuron_compile_cache.list_modules(cache_dir)
    problems = neuron_compile_cache.find_incomplete_modules(cache_dir)
    _print_problems(problems)
    print(f"{cache_dir}: {len(found) - len(problems)} of {len(found)} modules are complete")
    return ExitCode.FAILED if problems or not found else ExitCode.FINISHED


def _print_problems(problems: dict[str, str]) -> None:
    for name, problem in problems.items():
        print(f"{name} {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
