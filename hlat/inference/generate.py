"""Generate text with a model: `hlat generate`.

    run, checkpoint, average or Hugging Face directory -> engine -> text on the terminal, JSON lines

The engine and its layout are chosen for this machine, as in an evaluation. See docs/generate.md.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.argument_parser import (
    CommandLineParser,
    parse_number,
    parse_positive_int,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.distributed import exit_record, rank_environment
from hlat.inference.prompt_files import Row, load_prompts, open_output, write_row
from hlat.inference.sampling_settings import SamplingSettings

if TYPE_CHECKING:
    from hlat.config.run import Config
    from hlat.inference.model_source import ModelSource
    from hlat.inference.text_generator import TextGenerator

_EXAMPLES = """\
examples:
  hlat generate runs/x "def main("               text of the newest checkpoint, as it appears
  hlat generate runs/x "def main(" step=200 temperature=0 max_tokens=64
  hlat generate exported "Once" temperature=0.7 top_p=0.9 seed=3 stop='\\n\\n'
  hlat generate runs/x                           a conversation on the terminal
  echo "def main(" | hlat generate runs/x        the prompt from standard input
  hlat generate runs/x prompts=prompts.jsonl output=texts.jsonl
  hlat generate runs/x "Once" hardware=h200 parallelism.tp=8

A line of prompts= is a prompt; in a file *.jsonl it is {"prompt": "text"} or {"messages": [...]}.
The same settings give the same text. See docs/generate.md."""

_PROMPTS_PER_BATCH = 64
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def main(argv: Sequence[str] | None = None) -> int:
    """Generate and print text; return the exit code."""
    typed = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    arguments = parser.parse(typed)
    _split_words(parser, arguments)
    return run_command(lambda: _run(arguments, typed), None)


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "generate",
        "Continue a prompt with a model; without a prompt, hold a conversation on the terminal.",
        _EXAMPLES,
        takes_overrides=True,
    )
    add = parser.add_argument
    parser.add_model()
    add("words", nargs="*", metavar="PROMPT|OVERRIDE", help=_WORDS_HELP)
    add("--prompt", metavar="TEXT", help="the prompt, for one that looks like a setting")
    add("--prompts", type=_parse_path, metavar="FILE", help="prompts, one per line")
    add("--output", type=_parse_path, metavar="FILE", help="file for the texts of prompts=")
    add_sampling_settings(parser)
    return parser


_WORDS_HELP = "text to continue; hardware, parallelism, engine, compiler, precision"


def add_sampling_settings(parser: CommandLineParser) -> None:
    """Add the settings of generation to a parser."""
    add, default = parser.add_argument, SamplingSettings()
    parser.set_defaults(**vars(default))
    max_tokens = f"default: {default.max_tokens}"
    add("--max-tokens", type=parse_positive_int, metavar="N", help=max_tokens)
    temperature = f"0: the most likely token (default: {default.temperature:g})"
    parse_temperature = partial(parse_number, integer=False, positive=False)
    add("--temperature", type=parse_temperature, metavar="X", help=temperature)
    top_p = "sample from the most likely tokens with this total probability"
    add("--top-p", type=_parse_top_p, metavar="X", help=f"{top_p} (default: {default.top_p:g})")
    parse_seed = partial(parse_number, integer=True, positive=False)
    add("--seed", type=parse_seed, metavar="N", help=f"default: {default.seed}")
    stop = 'text that ends the generation, or ["A", "B"]; \\n is a newline'
    add("--stop", type=_parse_stop, metavar="TEXT", help=stop)


def _split_words(parser: CommandLineParser, arguments: argparse.Namespace) -> None:
    """Set `prompt` and `overrides` from the positional words; exit if a word is neither."""
    from hlat.inference.inference_config import OVERRIDABLE_GROUPS, parse_config_group

    arguments.overrides, prompts = [], []
    for word in arguments.words:
        key = word.partition("=")[0]
        if "=" in word and parse_config_group(word) in OVERRIDABLE_GROUPS:
            arguments.overrides.append(word)
        elif "=" in word and key.replace(".", "").isidentifier():
            parser.error_unknown(word)
        else:
            prompts.append(word)
    if arguments.prompt is not None:
        prompts.append(arguments.prompt)
    if len(prompts) > 1:
        parser.error(
            f"{len(prompts)} prompts; quote a prompt of several words, or use prompts=FILE"
        )
    if prompts and arguments.prompts is not None:
        parser.error("give either a prompt or prompts=FILE")
    if arguments.output is not None and arguments.prompts is None:
        parser.error("output=FILE needs prompts=FILE")
    arguments.prompt = prompts[0] if prompts else None


def _run(arguments: argparse.Namespace, typed: list[str]) -> ExitCode | int:
    from hlat.inference import model_source
    from hlat.inference.inference_config import build_inference_config

    rows = None if arguments.prompts is None else load_prompts(arguments.prompts)
    if arguments.prompt is None and rows is None and not sys.stdin.isatty():
        arguments.prompt = sys.stdin.read().removesuffix("\n")
        if not arguments.prompt:
            raise ConfigError("no prompt on standard input; give one after the model")
        typed = [*typed, f"prompt={arguments.prompt}"]
    source = model_source.find_model(
        arguments.source, arguments.step, arguments.tokenizer, arguments.ema
    )
    config = build_inference_config(source, arguments.overrides)
    if rank_environment.must_launch_workers(config):
        return _launch_workers(arguments, config, typed)
    return exit_record.run_with_exit_record(lambda: _generate(arguments, source, config, rows))


def _launch_workers(
    arguments: argparse.Namespace, config: "Config", typed: list[str]
) -> ExitCode | int:
    from hlat.config import entry_point
    from hlat.recovery import supervisor

    if arguments.prompt is None and arguments.prompts is None:
        raise ConfigError(
            f"a conversation needs one process, and the layout {config.num_processes}; give a "
            "prompt, or remove the overrides of hardware and parallelism"
        )
    command = entry_point.build_module_command(sys.executable, "hlat.inference.generate")
    code = supervisor.launch_workers(config, [*command, *typed])
    if code is ExitCode.PREEMPTED:
        raise KeyboardInterrupt
    return code


def _generate(
    arguments: argparse.Namespace,
    source: "ModelSource",
    config: "Config",
    rows: list[Row] | None,
) -> ExitCode:
    from hlat.inference.chat_loop import print_text, run_chat
    from hlat.inference.text_generator import open_text_generator

    is_rank0 = rank_environment.read_rank_info().is_rank0
    settings = build_sampling_settings(arguments)
    if is_rank0:
        print(f"{source.location}", file=sys.stderr, flush=True)
    with open_text_generator(source, config) as generator:
        if rows is not None:
            _generate_rows(generator, rows, settings, arguments.output if is_rank0 else None)
        elif arguments.prompt is None:
            run_chat(generator, settings)
        else:
            prompt = generator.encode(arguments.prompt)
            lost = source.tokenizer.measure_lost_text(arguments.prompt)
            if is_rank0 and lost.num_lost:
                print(f"WARNING: the tokenizer loses {lost} of the prompt", file=sys.stderr)
            show = print_text if is_rank0 else lambda text: None
            show(arguments.prompt)
            generator.stream(prompt, settings, show)
            show("\n")
    return ExitCode.FINISHED


def _generate_rows(
    generator: "TextGenerator", rows: list[Row], settings: SamplingSettings, output: Path | None
) -> None:
    """Write each row with the generated text, in batches."""
    prompts = [
        generator.encode_chat(row["messages"])
        if "messages" in row
        else generator.encode(row["prompt"])
        for row in rows
    ]
    is_rank0 = rank_environment.read_rank_info().is_rank0
    with open_output(output) as file:
        for start in range(0, len(rows), _PROMPTS_PER_BATCH):
            batch = slice(start, start + _PROMPTS_PER_BATCH)
            completions = generator.generate(prompts[batch], settings, start)
            if not is_rank0:
                continue
            for row, completion in zip(rows[batch], completions, strict=True):
                result = {
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "prompt_tokens": completion.num_prompt_tokens,
                    "completion_tokens": completion.num_tokens,
                }
                write_row(file, row | result)
            if output is not None:
                done = min(len(rows), start + _PROMPTS_PER_BATCH)
                print(f"{done} of {len(rows)} prompts", file=sys.stderr, flush=True)


def build_sampling_settings(arguments: argparse.Namespace) -> SamplingSettings:
    """Return the settings of `add_sampling_settings`."""
    names = [field.name for field in dataclasses.fields(SamplingSettings)]
    return SamplingSettings(**{name: getattr(arguments, name) for name in names})


def _parse_path(text: str) -> Path:
    return Path(text).expanduser()


def _parse_top_p(text: str) -> float:
    value = parse_number(text, integer=False, positive=True)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1; use a probability such as 0.9")
    return value


def _parse_stop(text: str) -> tuple[str, ...]:
    """Return the texts of a JSON list, or the one text."""
    texts: Any = [text]
    if text.startswith("["):
        try:
            texts = json.loads(text)
        except ValueError:
            texts = None
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise argparse.ArgumentTypeError(f'{text} is neither a text nor a list such as ["A", "B"]')
    if texts == [text]:
        return (re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text),)
    return tuple(texts)


if __name__ == "__main__":
    run_and_exit(main)
