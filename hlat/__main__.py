"""The `hlat` command: `hlat <command>` or `python -m hlat <command>`.

Each command is a module that can also be started on its own, such as `python -m hlat.train`. This
module imports none of them to print its help page or to complete a command line.
"""

import difflib
import runpy
import sys
from dataclasses import dataclass

import click
from click.shell_completion import CompletionItem, get_completion_class

from hlat.config.completion import complete_override


@dataclass(frozen=True)
class _CommandSpec:
    """A command of `hlat`: module, line of the help page, and `prefix` of the user's arguments."""

    module: str
    summary: str
    takes_overrides: bool = False
    prefix: tuple[str, ...] = ()


_SECTIONS = {
    "Train": {
        "train": _CommandSpec("hlat.train", "Train a model, or resume a run.", True),
        "sweep": _CommandSpec("hlat.train", "Train every point of a sweep.", True, ("-m",)),
        "campaign": _CommandSpec("hlat.jobs.campaign", "Run a chain of runs and evaluations."),
    },
    "Before a run": {
        "prepare": _CommandSpec("hlat.prepare", "Convert text files to training data."),
        "tokenizer": _CommandSpec("hlat.prepare.tokenizer_training", "Train a tokenizer on text."),
        "plan": _CommandSpec("hlat.plan", "Predict memory, step time and cost.", True),
        "doctor": _CommandSpec("hlat.doctor", "Check the numerics of a configuration.", True),
        "precompile": _CommandSpec("hlat.precompile", "Compile graphs for Trainium.", True),
    },
    "After a run": {
        "report": _CommandSpec("hlat.report", "Write the report page; compare runs."),
        "runs": _CommandSpec("hlat.study", "List, filter, compare and export runs."),
        "fit": _CommandSpec("hlat.report.fit", "Fit scaling laws; predict a run before it starts."),
        "mixture": _CommandSpec("hlat.report.mixture", "Propose a mixture of sources from runs."),
        "generate": _CommandSpec(
            "hlat.inference.generate", "Continue a prompt with a model, or chat.", True
        ),
        "serve": _CommandSpec(
            "hlat.inference.serve", "Serve a model with OpenAI's API and a chat page.", True
        ),
        "evaluate": _CommandSpec("hlat.evaluate", "Evaluate a model on benchmarks.", True),
        "checkpoint": _CommandSpec("hlat.checkpoint", "List, verify, prune or sign checkpoints."),
        "average": _CommandSpec("hlat.average", "Average the weights of checkpoints."),
        "export": _CommandSpec("hlat.export", "Export a model to Hugging Face format."),
    },
    "On a cluster": {
        "jobs": _CommandSpec("hlat.jobs", "List, follow, cancel or resubmit Slurm jobs."),
        "cluster": _CommandSpec("hlat.jobs.cluster", "Write an AWS ParallelCluster config.", True),
    },
}
_COMMANDS = {name: spec for section in _SECTIONS.values() for name, spec in section.items()}
_EXAMPLES = """\
Examples:
  hlat train                                  train a small model on this machine
  hlat sweep optimizer.lr=1e-3,3e-3           one run per value
  hlat plan model=7b hardware=trn1_32xl       memory, time and cost of a run
  hlat report runs/tiny                       write the report page of a run

`hlat COMMAND --help` prints the settings and examples of a command.
`hlat completion bash|zsh|fish` prints a completion script: eval "$(hlat completion bash)"."""


class _HlatGroup(click.Group):
    """Group of all commands, whose help page has one section per purpose."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, "completion"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            return _build_command(cmd_name, _COMMANDS[cmd_name])
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
            ctx.fail(f"{args[0]} is not a command; {hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(10), spec.summary) for name, spec in commands.items()]
                )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{_EXAMPLES}\n")


def _build_command(name: str, spec: _CommandSpec) -> click.Command:
    def run(arguments: tuple[str, ...]) -> None:
        sys.argv[1:] = [*spec.prefix, *arguments]
        runpy.run_module(spec.module, run_name="__main__", alter_sys=True)

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if not spec.takes_overrides:
            return [CompletionItem(incomplete, type="file")]
        typed = [*ctx.params.get("arguments", ()), incomplete]
        return [CompletionItem(value) for value in complete_override(typed)]

    arguments = click.Argument(
        ["arguments"], nargs=-1, type=click.UNPROCESSED, shell_complete=complete
    )
    return click.Command(
        name,
        params=[arguments],
        callback=run,
        short_help=spec.summary,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )


@click.group(
    cls=_HlatGroup,
    name="hlat",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Pre-training experiments on large language models.",
)
def main() -> None:
    """Run a command."""


@main.command("completion", short_help="Print a completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def print_completion_script(shell: str) -> None:
    """Print the script that completes commands and overrides in SHELL.

    Example: eval "$(hlat completion bash)"
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    click.echo(completion_class(main, {}, "hlat", "_HLAT_COMPLETE").source())


if __name__ == "__main__":
    main(prog_name="hlat")
