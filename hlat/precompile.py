"""Compiles a configuration's graphs before expensive nodes train it: `python -m hlat.precompile`.

    compose -> fetch -> trace four steps -> compile in parallel -> verify -> share     on every node
    merge, from the shared folder onto the disk of a node that is to train

What is compiled follows from what a step computes: model, batch, layout and number of processes,
precision, masks of the data, optimizer and its constants, compiler and its flags. The learning
rate, the number of steps, the seed and the corpus go into graphs as data, and change none.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from omegaconf import DictConfig

from hlat import compiler, compiler_cache
from hlat.config import entry, frozen
from hlat.config.arguments import Parser
from hlat.config.engine import Backend
from hlat.config.errors import ConfigError, Exit
from hlat.config.resolve import resolve
from hlat.config.run import Config
from hlat.data.preparation.progress import Progress
from hlat.engine import tracing
from hlat.planning.feasibility import refuse_infeasible

_EXAMPLES = """\
examples:
  python -m hlat.precompile model=7b engine=nxd hardware=trn1_32xl compiler=neuron_2_28
  srun --nodes=64 --ntasks-per-node=1 python -m hlat.precompile experiment=hlat_7b
  python -m hlat.precompile verify                      is all that was traced compiled
  python -m hlat.precompile merge runs/.compiled        to where training on this node looks

A node looks in NEURON_COMPILE_CACHE_URL, and without that in /var/tmp/neuron-compile-cache. What it
has compiled it shares in <run.root>/.compiled, and what it finds there it does not compile again.
docs/precompile.md tells more."""

_TOOL = "neuron_parallel_compile"
_INTERRUPTED = 130


def main() -> None:
    """Merge or verify where the first word says so, else compile what is composed; exit."""
    try:
        if sys.argv[1:] and sys.argv[1] in ("merge", "verify", "-h", "--help"):
            sys.exit(look_after(sys.argv[1:]))
        entry.run(precompile)
    except OSError as error:
        print(f"hlat: {error.filename}: {error.strerror or error}", file=sys.stderr)
        sys.exit(Exit.FAILED)


def precompile(composed: DictConfig) -> Exit:
    """Trace and compile the composed configuration on this node; return the exit code."""
    if composed.engine.name is not Backend.nxd:
        name = composed.engine.name.value
        raise ConfigError(f"engine.name={name} has no graphs to compile ahead; add engine=nxd")
    config = resolve(composed)
    refuse_infeasible(config)
    if (tool := shutil.which(_TOOL)) is None:
        raise ConfigError(f"{_TOOL} is not on the PATH; activate an environment with torch-neuronx")
    variables = entry.users_environment() | compiler.environment(config.compiler, config.precision)
    cache = compiler_cache.location(variables)
    variables["NEURON_COMPILE_CACHE_URL"] = str(cache)
    shared = compiler_cache.shared(Path(config.run.root))
    if compiler_cache.modules(shared):
        _merge([shared], cache)
    with _traced(config, composed) as traced:
        for name in compiler_cache.discard_incomplete(cache):
            print(f"{name} was left incomplete by an earlier attempt, and is compiled anew")
        if not _does(tool, "collect", traced, variables | tracing.meeting(config)):
            return Exit.FAILED
    compiled = _does(tool, "compile", [], variables)
    code = max(_verify(cache), Exit.FINISHED if compiled else Exit.FAILED)
    if compiler_cache.modules(cache):
        _merge([cache], shared)
    return code


@contextmanager
def _traced(config: Config, composed: DictConfig) -> Iterator[list[str]]:
    """What traces a configuration on this node; it is frozen, as a job's was long before."""
    with tracing.run_root(config) as root, tempfile.TemporaryDirectory(prefix="hlat-") as made:
        words = frozen.Words(entry.overrides(), [])
        frozen.save(Path(made), composed, words, tracing.changes(root))
        yield entry.frozen_command(sys.executable, Path(made))


def _does(tool: str, step: str, words: list[str], variables: Mapping[str, str]) -> bool:
    """Run one step of the tool; it shows its progress itself. Returns whether it succeeded."""
    code = subprocess.call([tool, "--command", step, *words], env=variables)
    if code != 0:
        print(f"hlat: {_TOOL} --command {step} exited with {code}", file=sys.stderr)
    return code == 0


def look_after(words: Sequence[str]) -> int:
    """Merge or verify caches; return the exit code."""
    parser = Parser(
        prog="python -m hlat.precompile",
        usage="%(prog)s OVERRIDE... | merge FOLDER... [--into DIR] | verify [FOLDER]",
        description="Compile the graphs of a configuration for trn1 on this node, or merge and\n"
        "verify the folders in which nodes keep them.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("action", choices=("merge", "verify"), help="without one: compile what is composed")
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="folders of compiled graphs")
    add("--into", type=Path, metavar="DIR", help="merge: the folder to complete")
    arguments = parser.parse_intermixed_args(words)
    folders, into, merges = arguments.folders, arguments.into, arguments.action == "merge"
    if merges and not folders:
        parser.error("which folders to merge is missing")
    if not merges and (into is not None or len(folders) > 1):
        parser.error("verify takes one folder")
    try:
        if merges:
            return _merge(folders, into or compiler_cache.location(os.environ))
        return _verify(folders[0] if folders else compiler_cache.location(os.environ))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return _INTERRUPTED


def _merge(sources: list[Path], target: Path) -> Exit:
    if empty := [source for source in sources if not compiler_cache.modules(source)]:
        raise ConfigError(*(f"{source} holds no neuronxcc-*/MODULE_*" for source in empty))
    with closing(Progress("merging", compiler_cache.bytes_to_merge(sources, target))) as progress:
        merged = compiler_cache.merge(sources, target, progress.add)
    _tell(merged.left)
    print(f"{target}: {len(merged.added)} modules added, {len(merged.present)} were there")
    return Exit.FAILED if merged.left else Exit.FINISHED


def _verify(cache: Path) -> Exit:
    found, problems = compiler_cache.modules(cache), compiler_cache.problems(cache)
    _tell(problems)
    print(f"{cache}: {len(found) - len(problems)} of {len(found)} modules are complete")
    return Exit.FAILED if problems or not found else Exit.FINISHED


def _tell(problems: dict[str, str]) -> None:
    for name, problem in problems.items():
        print(f"{name} {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
