"""Evaluates a model on the paper's tasks: `python -m hlat.evaluate`.

    run, checkpoint or Hugging Face folder -> engine -> lm-evaluation-harness -> scores, record

A checkpoint knows no layout, so the engine and its layout are chosen for the machine that there is;
one process by default. docs/evaluation.md tells more.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.arguments import Parser, count
from hlat.config.errors import ConfigError, Exit
from hlat.engine import processes
from hlat.evaluation.interruption import Interruptible

if TYPE_CHECKING:
    from hlat.evaluation.order import Order
    from hlat.evaluation.subject import Subject

_EXAMPLES = """\
sets of the paper's tasks:
  hlat_table2   MMLU, commonsense, world knowledge, reading comprehension, GSM8K (Tables II and IV)
  hlat_table5   CrowS-Pairs and TruthfulQA (Table V)
  hlat_bbh, and one for each column: hlat_mmlu hlat_cr hlat_wk hlat_rc hlat_math hlat_csp_en ...
  humaneval     HumanEval's functions, from HumanEval.jsonl.gz in data=DIR (docs/humaneval.md)
Any other name is a task or a group of lm-evaluation-harness.

settings:
  tasks=A,B     what is asked
  limit=N       only the first N questions of each task
  shots=N       examples before each question of the harness's own tasks
  data=DIR      copies of data sets, each in a folder of its name on the hub
  follow=true   every checkpoint that a run keeps for ever, as it appears, until the run ends;
                leaves out tasks that have scores
  samples=N, run_generated_code=true, accept_weak_sandbox=true
                of each of HumanEval's functions; your consent to run, shut away, what a model wrote

examples:
  python -m hlat.evaluate runs/x tasks=hlat_table2
  python -m hlat.evaluate runs/x tasks=hlat_cr limit=200 follow=true
  python -m hlat.evaluate exported tasks=hellaswag,lambada_openai data=~/datasets
  python -m hlat.evaluate runs/x tasks=hlat_table2 hardware=h200 parallelism.tp=8
as a job of Slurm or Kubernetes, with the settings that jobs of hlat.train have:
  python -m hlat.evaluate runs/x tasks=hlat_table2 follow=true hydra/launcher=slurm \\
      hydra.launcher.partition=gpu hardware=h100_p5 parallelism.tp=8
  python -m hlat.jobs runs/x/evaluations

Scores are written to evaluations/ beside what was evaluated; those of a run's checkpoint also to
its record, which curves are drawn from. After a signal those of finished tasks are kept, and the
exit code is 75. python -m hlat.report tables: beside the paper's."""

_CONSENTS = ("run_generated_code", "accept_weak_sandbox")
_LAUNCHER = ("hydra/launcher=", "hydra.launcher.")
"""What overrides of the launcher and of its settings begin with."""


def _parser() -> Parser:
    parser = Parser(
        prog="python -m hlat.evaluate",
        usage="%(prog)s RUN|CHECKPOINT|HF_FOLDER tasks=A,B [SETTING...] [OVERRIDE...]",
        description="Ask tasks of lm-evaluation-harness of a model, on any engine and layout.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("source", metavar="MODEL", help="run, checkpoint, average or Hugging Face folder")
    words = (
        "settings as below; overrides of hardware, parallelism, engine, compiler and precision; "
        "hydra/launcher and its settings"
    )
    add("words", nargs="*", metavar="WORD", help=words)
    add("--step", type=int, metavar="N", help="checkpoint of the run (default: the newest)")
    add("--tokenizer", type=Path, metavar="FILE", help="the run's tokenizer.json, if it has moved")
    add("--output", type=Path, metavar="FILE", help="where to write the scores")
    add("--json", action="store_true", help="print the scores as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, and print what it came to; return the exit code."""
    os.environ["TQDM_DISABLE"] = "1"  # before any import of it: the harness shows a bar for all
    typed = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = parser.parse_intermixed_args(typed)
    words = _sorted(parser, arguments.words)
    if "tasks" not in words.settings:
        parser.error("what to ask is missing: give tasks=hlat_table2, say")
    with Interruptible() as interruptible:
        try:
            return _evaluate(arguments, words, typed)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return Exit.CONFIGURATION
        except OSError as error:
            what = "files of the job" if words.launching else "scores"
            print(f"the {what} cannot be written ({error})", file=sys.stderr)
            return Exit.FAILED
        except BaseException:
            if not interruptible.heard:
                raise
            return _interrupted()


def _interrupted() -> Exit:
    if processes.RECORDS in os.environ:
        os._exit(Exit.PREEMPTED)  # its supervisor tells; other threads would wait for lost peers
    print("\ninterrupted; tasks that were finished are kept", file=sys.stderr)
    return Exit.PREEMPTED


@dataclass(frozen=True)
class _Words:
    """Settings of an evaluation, and overrides: of the configuration, and of what sends it."""

    settings: dict[str, Any]
    overrides: list[str]
    launching: list[str]


def _sorted(parser: Parser, words: Sequence[str]) -> _Words:
    from hlat.evaluation.machine import GROUPS, group

    overrides = [word for word in words if group(word) in GROUPS]
    launching = [word for word in words if word.lstrip("+~").startswith(_LAUNCHER)]
    others = [word for word in words if word not in (*overrides, *launching)]
    known = {
        "tasks": lambda text: tuple(filter(None, text.split(","))),
        "limit": count,
        "shots": lambda text: 0 if text == "0" else count(text),
        "data": lambda text: Path(text).expanduser().absolute(),
        "follow": _choice,
        "samples": count,
        **dict.fromkeys(_CONSENTS, _choice),
    }
    return _Words(parser.settings(others, known), overrides, launching)


def _choice(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("use true or false")
    return text == "true"


def _evaluate(arguments: argparse.Namespace, words: _Words, typed: list[str]) -> int:
    from hlat.config import compose

    order = _order(arguments, words.settings)
    if words.launching and (chosen := compose.launcher(words.launching)) is not None:
        from hlat.evaluation.sending import prepare

        launcher, folder = chosen
        kept = [word for word in typed if word not in words.launching]
        named = (arguments.source, arguments.step, order, kept, words.overrides)
        launcher.evaluate(prepare(*named, launcher.sees_files), folder)
        return Exit.FINISHED
    return _evaluate_here(arguments, order, words.overrides, typed)


def _order(arguments: argparse.Namespace, settings: dict[str, Any]) -> "Order":
    from hlat.evaluation import humaneval
    from hlat.evaluation.order import Order

    followed = Path(arguments.source) if settings.pop("follow", False) else None
    given = {key: settings.pop(key) for key in ("samples", *_CONSENTS) if key in settings}
    code = humaneval.Settings(given.pop("samples", humaneval.Settings.num_samples), **given)
    # A job may be started again at any time, and following anyway
    resumes = followed is not None or processes.MEETING in os.environ
    return Order(**settings, output=arguments.output, followed=followed, code=code, resumes=resumes)


def _evaluate_here(
    arguments: argparse.Namespace, order: "Order", overrides: Sequence[str], typed: list[str]
) -> int:
    from hlat.evaluation import follow, library, outline
    from hlat.evaluation import order as orders
    from hlat.evaluation.evaluation import evaluate
    from hlat.evaluation.machine import configure

    if order.harness_tasks:
        library.refuse_missing()
    orders.refuse(order, arguments.step)
    one = None if order.followed is not None else _found(arguments)
    config = configure(one or outline.of_run(Path(arguments.source)), overrides)
    if processes.must_start(config):
        from hlat.config import entry
        from hlat.recovery import supervisor

        command = entry.module_command(sys.executable, "hlat.evaluate")
        end = supervisor.start(config, [*command, *typed])
        return _interrupted() if end is Exit.PREEMPTED else end
    if one is None:
        one = follow.first(Path(arguments.source), arguments.tokenizer)
        config = configure(one, overrides)

    def tell(subject: "Subject", row: dict[str, Any]) -> None:
        print(json.dumps(row) if arguments.json else "\n".join(_told(row)), flush=True)

    return processes.recorded(lambda: evaluate(config, order, one, tell))


def _found(arguments: argparse.Namespace) -> "Subject":
    from hlat.evaluation import subject

    return subject.find(
        arguments.source,
        arguments.step,
        arguments.tokenizer,
        lambda reason: print(f"WARNING: {reason}", file=sys.stderr),
    )


def _told(row: dict[str, Any]) -> list[str]:
    """What an evaluation came to, in a few lines."""
    lines = [f"{row['name']}: {row['location']}"]
    for name, task in row["tasks"].items():
        shown = {task["counts"]} if task["counts"] in task["metrics"] else set(task["metrics"])
        numbers = ", ".join(
            f"{metric.partition(',')[0]} {100 * task['metrics'][metric]:.2f}"
            + (f" ({100 * task['errors'][metric]:.2f})" if metric in task["errors"] else "")
            for metric in sorted(shown)
        )
        lines.append(f"  {name:<28} {numbers}  of {task['questions']}")
        if task["shortened"]:
            lines.append(
                f"  {'':<28} {task['shortened']} prompts were longer than the model reads, and lost"
                " their beginning"
            )
    if row["scores"]:
        scores = ", ".join(f"{key} {value:.1f}" for key, value in row["scores"].items())
        lines.append(f"in percent, as in the paper's tables: {scores}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
