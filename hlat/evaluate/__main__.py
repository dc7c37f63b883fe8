"""Evaluate a model on benchmarks: `hlat evaluate`.

    run, checkpoint or Hugging Face directory -> engine -> lm-evaluation-harness -> scores, record

A checkpoint has no layout, so the engine and its layout are chosen for this machine; the default is
one process. See docs/evaluation.md.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config import extensions
from hlat.config.argument_parser import (
    CommandLineParser,
    build_list_parser,
    is_launcher_override,
    parse_positive_int,
    print_os_error,
)
from hlat.config.config_errors import ConfigError, ExitCode, escape_control_characters
from hlat.distributed import exit_record, process_signals, rank_environment
from hlat.evaluate.harness_settings import (
    HarnessSettings,
    parse_bool,
    parse_chat_template,
    parse_doc_ids,
    parse_gen_kwargs,
    parse_num_samples,
    parse_seed,
)
from hlat.evaluate.paper_tasks import HELDOUT
from hlat.recovery.signal_handler import handle_signals

if TYPE_CHECKING:
    from hlat.evaluate.eval_request import EvalRequest

_EXAMPLES = """\
sets of the paper's tasks:
  hlat_table2   MMLU, commonsense, world knowledge, reading comprehension, GSM8K (Tables II and IV)
  hlat_table5   CrowS-Pairs and TruthfulQA (Table V)
  hlat_bbh, and one for each column: hlat_mmlu hlat_cr hlat_wk hlat_rc hlat_math hlat_csp_en ...
  humaneval     HumanEval, from HumanEval.jsonl.gz in data=DIR (docs/humaneval.md)
  heldout       loss and bits per byte on the held-out sets of the run, or on heldout=PATH
Any other name is a task or a group of lm-evaluation-harness, or the path of a YAML file with one.

examples:
  hlat evaluate runs/x tasks=hlat_table2
  hlat evaluate runs/x tasks=hlat_cr limit=200 follow=true
  hlat evaluate runs/x tasks=heldout step=200
  hlat evaluate exported tasks=heldout heldout=runs/x    held-out sets of a run
  hlat evaluate runs/x tasks=heldout heldout=book.txt    a file or directory of text
  hlat evaluate exported tasks=hellaswag,lambada_openai data=~/datasets
  hlat evaluate exported tasks=my_task.yaml              a custom task
  hlat evaluate runs/x tasks=hlat_table2 hardware=h200 parallelism.tp=8
as a job of Slurm or Kubernetes, with the launcher settings of hlat train:
  hlat evaluate runs/x tasks=hlat_table2 follow=true hydra/launcher=slurm \\
      hydra.launcher.partition=gpu hardware=h100_p5 parallelism.tp=8
  hlat jobs runs/x/evaluations

Scores are written to evaluations/ beside the model; scores of a run's checkpoint are also added to
the run's record, from which curves are drawn. After a signal, scores of finished tasks are kept and
the exit code is 75. `hlat report tables` prints them beside the paper's."""


_DATA_PREFIXES = ("data.", "evaluation.")
"""Prefixes of overrides of the recorded configuration, for tasks=heldout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print the scores; return the exit code."""
    os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported: the harness has its own bars
    typed = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    arguments = parser.parse(typed)
    _split_overrides(parser, arguments)
    if not any(arguments.tasks or ()):
        parser.error("no tasks; give tasks=hlat_table2, for example")
    if (arguments.heldout or arguments.data_overrides) and HELDOUT not in arguments.tasks:
        word = arguments.data_overrides[0] if arguments.data_overrides else "heldout="
        parser.error(f"{word} needs tasks={HELDOUT}")
    with _interrupt_on_signal() as received_signal:
        try:
            return _run_command(arguments, typed)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return ExitCode.CONFIGURATION
        except OSError as error:
            what = "files of the job" if arguments.launcher_overrides else "scores"
            return print_os_error(error, f"the {what} cannot be written")
        except BaseException:
            if not received_signal.is_set():
                raise
            return _report_interruption()


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "evaluate",
        "Evaluate a model on tasks of lm-evaluation-harness, on any engine and layout.",
        _EXAMPLES,
        takes_overrides=True,
    )
    add = parser.add_argument
    parser.add_model()
    overrides = (
        "hardware, parallelism, engine, compiler, precision; hydra/launcher and its settings"
    )
    add("overrides", nargs="*", metavar="OVERRIDE", help=overrides)
    tasks = build_list_parser(str)
    add("--tasks", type=tasks, metavar="A,B", help="tasks, sets or YAML files (required)")
    include_path = "directory with YAML files of custom tasks"
    add("--include-path", type=_parse_path, metavar="DIR", help=include_path)
    add("--limit", type=parse_positive_int, metavar="N", help="first N questions of each task")
    add("--shots", type=_parse_shots, metavar="N", help="few-shot examples of harness tasks")
    add("--data", type=_parse_path, metavar="DIR", help="copies of data sets, by their hub name")
    heldout = "heldout: another run, or a file or directory of text (default: the model's run)"
    add("--heldout", metavar="PATH", help=heldout)
    _add_harness_settings(parser)
    follow = "every checkpoint that a run keeps, as it appears; skips tasks with scores"
    add("--follow", action="store_true", help=follow)
    items = "write each item of harness tasks, as lm_eval --log_samples"
    add("--log-samples", action="store_true", help=items)
    samples = "humaneval: samples of each function"
    add("--samples", type=parse_num_samples, metavar="N", help=samples)
    consent = "humaneval: consent to run, in a sandbox, code that the model wrote"
    add("--run-generated-code", action="store_true", help=consent)
    add("--accept-weak-sandbox", action="store_true", help="humaneval: see docs/humaneval.md")
    add("--output", type=Path, metavar="FILE", help="file to write the scores to")
    add("--json", action="store_true", help="print the scores as JSON")
    return parser


def _add_harness_settings(parser: CommandLineParser) -> None:
    """Add settings of the harness, under its names."""
    add = parser.add_argument
    template = "format prompts with the model's chat template"
    add("--apply-chat-template", type=parse_chat_template, metavar="true|NAME", help=template)
    system = "system message, or text before each prompt"
    add("--system-instruction", metavar="TEXT", help=system)
    multiturn = "false: few-shot examples and question are one message of a chat template"
    add("--fewshot-as-multiturn", type=parse_bool, metavar="true|false", help=multiturn)
    generation = "settings of generation, such as temperature=0.7,do_sample=true"
    add("--gen-kwargs", type=parse_gen_kwargs, metavar="K=V,..", help=generation)
    seed = "one seed, or those of Python, NumPy, torch and few-shot (default: 0,1234,1234,1234)"
    add("--seed", type=parse_seed, metavar="N[,N,N,N]", help=seed)
    doc_ids = 'indices of documents, {"task": [0, 3]}, or a JSON file'
    add("--doc-ids", type=parse_doc_ids, metavar="JSON", help=doc_ids)
    max_length = "maximum tokens of a prompt and its continuation"
    add("--max-length", type=parse_positive_int, metavar="N", help=max_length)
    cache = "file of responses that are not computed again"
    add("--use-cache", type=_parse_path, metavar="FILE", help=cache)


def _split_overrides(parser: CommandLineParser, arguments: argparse.Namespace) -> None:
    """Move launcher overrides to `arguments.launcher_overrides`; exit if any is neither."""
    from hlat.inference.inference_config import OVERRIDABLE_GROUPS, parse_config_group

    given, arguments.overrides, arguments.launcher_overrides = arguments.overrides, [], []
    arguments.data_overrides = []
    for word in given:
        if is_launcher_override(word):
            arguments.launcher_overrides.append(word)
        elif parse_config_group(word) in OVERRIDABLE_GROUPS:
            arguments.overrides.append(word)
        elif word.startswith(_DATA_PREFIXES) and "=" in word:
            arguments.data_overrides.append(word)
        else:
            parser.error_unknown(word)


def _report_interruption() -> ExitCode:
    if rank_environment.RECORDS_DIR_ENV in os.environ:
        # The supervisor prints the message; other threads of this process may wait for lost ranks
        os._exit(ExitCode.PREEMPTED)
    print("\ninterrupted; scores of finished tasks are kept", file=sys.stderr)
    return ExitCode.PREEMPTED


@contextmanager
def _interrupt_on_signal() -> Iterator[threading.Event]:
    """Raise KeyboardInterrupt on rank 0 at the first signal within the context.

    The results of a task are on disk as soon as the task has finished. After a signal, rank 0 only
    writes the run's event, and the other ranks end at once, since they only wait for rank 0. hlat's
    supervisor repeats every signal and kills ranks that remain, so rank 0 ignores all further
    signals under a supervisor. Without one, Ctrl-C after the first signal ends rank 0.

    The event is set after a signal; exceptions may then be caused by ranks that have exited.
    """
    received, process = threading.Event(), os.getpid()

    def handle_signal(signum: int, frame: object) -> None:
        if os.getpid() != process:  # a worker of a pool, which the harness forks and terminates
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        received.set()
        is_supervised = rank_environment.RECORDS_DIR_ENV in os.environ
        for each in process_signals.STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if not is_supervised:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    is_rank0 = rank_environment.read_rank_info().is_rank0
    with handle_signals(handle_signal if is_rank0 else signal.SIG_DFL):
        yield received


def _parse_shots(text: str) -> int:
    return 0 if text == "0" else parse_positive_int(text)


def _parse_path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _run_command(arguments: argparse.Namespace, argv: list[str]) -> int:
    from hlat.config import compose

    request, launcher_overrides = _build_request(arguments), arguments.launcher_overrides
    chosen = compose.instantiate_launcher(launcher_overrides) if launcher_overrides else None
    if chosen is None:
        return _evaluate_locally(arguments, request, argv)
    from hlat.evaluate.eval_request import build_evaluation_job

    launcher, directory = chosen
    job_argv = [word for word in argv if word not in launcher_overrides]
    shares_filesystem = launcher.shares_file_system
    extensions.validate_job_files(job_argv, shares_filesystem)
    job = build_evaluation_job(
        request, job_argv, arguments.overrides, shares_filesystem, launcher.waits
    )
    launcher.submit_command(job, directory)
    return ExitCode.FINISHED


def _build_request(arguments: argparse.Namespace) -> "EvalRequest":
    from hlat.evaluate.eval_request import EvalRequest
    from hlat.evaluate.humaneval import HumanEvalSettings

    names = [
        *("source", "step", "follow", "limit", "shots", "data", "output", "heldout"),
        *("log_samples", "include_path", "use_cache", "ema"),
    ]
    harness = {each.name: getattr(arguments, each.name) for each in fields(HarnessSettings)}
    return EvalRequest(
        tasks=tuple(filter(None, arguments.tasks)),
        **{name: getattr(arguments, name) for name in names},
        harness=HarnessSettings(**{name: v for name, v in harness.items() if v is not None}),
        humaneval_settings=HumanEvalSettings(
            arguments.samples or HumanEvalSettings.num_samples,
            run_generated_code=arguments.run_generated_code,
            accept_weak_sandbox=arguments.accept_weak_sandbox,
        ),
        data_overrides=tuple(arguments.data_overrides),
        # A job may be restarted at any time
        skip_completed=arguments.follow or rank_environment.RDZV_ENDPOINT_ENV in os.environ,
    )


def _evaluate_locally(
    arguments: argparse.Namespace, request: "EvalRequest", argv: list[str]
) -> int:
    from hlat.evaluate import checkpoint_watcher, lm_eval_tasks
    from hlat.evaluate.eval_request import validate_request
    from hlat.evaluate.evaluator import run_evaluation
    from hlat.inference import model_metadata, model_source
    from hlat.inference.inference_config import build_inference_config

    if request.harness_tasks:
        lm_eval_tasks.validate_harness_installed()
    validate_request(request)
    run_dir, source = request.followed_run, None
    if run_dir is None:
        source = model_source.find_model(
            request.source, request.step, arguments.tokenizer, request.ema
        )
    metadata = source or model_metadata.load_run_metadata(Path(request.source))
    config = build_inference_config(metadata, arguments.overrides)
    if rank_environment.must_launch_workers(config):
        from hlat.config import entry_point
        from hlat.recovery import supervisor

        command = entry_point.build_module_command(sys.executable, "hlat.evaluate")
        code = supervisor.launch_workers(config, [*command, *argv])
        return _report_interruption() if code is ExitCode.PREEMPTED else code
    if source is None:
        run_dir = Path(request.source)
        source = checkpoint_watcher.wait_for_first_checkpoint(run_dir, arguments.tokenizer)
        config = build_inference_config(source, arguments.overrides)

    def print_scores(row: dict[str, Any]) -> None:
        text = json.dumps(row) if arguments.json else "\n".join(_format_scores(row))
        print(escape_control_characters(text), flush=True)

    return exit_record.run_with_exit_record(
        lambda: run_evaluation(config, request, source, print_scores)
    )


_NOTES = {
    "shortened": "prompts are longer than the context of the model and were truncated on the left",
    "empty_contexts": "contexts have no token and were replaced by BOS, or else EOS",
    "empty_continuations": "continuations have no token; their log-likelihood is 0",
    "without_system": "prompts have no system message, which the chat template rejects",
    "cached": "responses were in the cache",
}
"""Sentence for each count of unusual requests of a task."""


def _format_scores(row: dict[str, Any]) -> list[str]:
    """Return the lines that the console shows of an evaluation."""
    from hlat.evaluate.evaluation_results import format_metric

    lines = [f"{row['name']}: {row['location']}"]
    for name, task in row["tasks"].items():
        if name.partition(":")[0] == HELDOUT:
            lines += _format_heldout(name, task)
            continue
        shown = {task["counts"]} if task["counts"] in task["metrics"] else set(task["metrics"])
        numbers = ", ".join(
            format_metric(metric, task["metrics"][metric], task["errors"].get(metric))
            for metric in sorted(shown)
        )
        lines.append(f"  {name:<28} {numbers}  of {task['questions']}")
        lines += [
            f"  {'':<28} {task[key]:,} {sentence}"
            for key, sentence in _NOTES.items()
            if task.get(key)
        ]
    if row["scores"]:
        scores = ", ".join(f"{key} {value:.1f}" for key, value in row["scores"].items())
        lines.append(f"in percent, as in the paper's tables: {scores}")
    return lines


def _format_heldout(name: str, task: dict[str, Any]) -> list[str]:
    """Return a line with bits per byte by source, one with the loss, and one with the text."""
    lines = []
    for metric, label in (("bits_per_byte", "bits per byte"), ("loss", "loss, nats per token")):
        keys = [key for key in task["metrics"] if key.startswith(metric)]
        numbers = ", ".join(
            f"{key.partition(',')[2]} {task['metrics'][key]:.4f}"
            + (f" ± {task['errors'][key]:.4f}" if key in task["errors"] else "")
            for key in keys
        )
        lines.append(f"  {name:<28} {label}: {numbers}")
    if "bytes" in task:  # scores of earlier versions lack it
        counts = [f"{sum(task[key].values()):,} {key}" for key in ("tokens", "bytes", "documents")]
        mean = "; mean: equal weights of the sources; ±: standard error over documents"
        lines.append(f"  {'':<28} {', '.join(counts)}{mean}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
