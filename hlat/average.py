"""Average the weights of checkpoints: `hlat average`.

    run -> checkpoints (verified, of one model) -> mean -> a checkpoint of weights

HLAT-70B was evaluated on the mean of its last two checkpoints (HLAT paper, sections IV-C and V-D).
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from hlat.config.argument_parser import (
    CommandLineParser,
    build_list_parser,
    parse_positive_int,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ExitCode
from hlat.config.precision import Dtype
from hlat.distributed import rank_environment

_EXAMPLES = """\
examples:
  hlat average runs/x last=2                        the newest two checkpoints
  hlat average runs/x steps=200,400,600             the checkpoints of these steps
  hlat average runs/x steps=200,400 weights=1,3     a weighted mean
  hlat average runs/x last=2 output=mean dtype=bf16
  hlat average runs/x last=2 hydra/launcher=slurm hydra.launcher.after=runs/x    a job after the run

Then run: hlat export AVERAGE output=DIR. See docs/averaging.md."""

_MAX_WEIGHT = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Write the average and print how to use it; return the exit code."""
    parser = _build_parser()
    typed = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse(typed)
    if error := _find_usage_error(arguments):
        parser.error(error)
    parser.validate_launcher_overrides(arguments.overrides)
    output = arguments.output or f"{arguments.run}/averages"
    interrupted = "interrupted; no part of the average was written"
    problem = f"{output} cannot be written"
    return run_command(lambda: _run(arguments, typed), problem, interrupted)


def _run(arguments: argparse.Namespace, typed: Sequence[str]) -> ExitCode:
    """Average on this machine, or submit a job."""
    overrides = arguments.overrides
    if overrides:
        from hlat.config.command_submission import submit_command

        words = [word for word in typed if word not in overrides]
        if submit_command("average", Path(arguments.run), words, overrides):
            return ExitCode.FINISHED
    return _run_average(arguments)


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "average",
        "Write the mean of the weights of a run's checkpoints as a checkpoint of weights.\n"
        "Every checkpoint is verified first; a damaged one is an error.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="directory or URL of a run")
    add("overrides", nargs="*", metavar="OVERRIDE", help="hydra/launcher and its settings")
    add("--last", type=parse_positive_int, metavar="N", help="average the newest N checkpoints")
    steps = build_list_parser(parse_positive_int)
    add("--steps", type=steps, metavar="A,B", help="average the checkpoints of these steps")
    weights = build_list_parser(_parse_weight)
    add("--weights", type=weights, metavar="X,Y", help="weight of each checkpoint (default: 1)")
    add("--output", type=Path, metavar="DIR", help="new directory (default: in RUN/averages)")
    trusted = "require signatures by one of the public keys in FILE"
    add("--trusted-keys", metavar="FILE", help=trusted)
    add("--signing-key", metavar="FILE", help="private key to sign the average with")
    dtypes = [dtype.value for dtype in Dtype]
    add("--dtype", choices=dtypes, help="dtype to write (default: that of the stored weights)")
    return parser


def _find_usage_error(arguments: argparse.Namespace) -> str | None:
    """Return the problem of settings that are valid one by one but not together."""
    steps, last = arguments.steps, arguments.last
    if (last is None) == (steps is None):
        return "give either last=N or steps=A,B to select checkpoints"
    num_checkpoints = last if steps is None else len(steps)
    if num_checkpoints < 2:
        return "an average needs two checkpoints or more"
    if steps is not None and len(set(steps)) < num_checkpoints:
        return f"steps={','.join(map(str, steps))} has a step twice; use weights= instead"
    if arguments.weights is not None and len(arguments.weights) != num_checkpoints:
        return f"weights= has {len(arguments.weights)} numbers for {num_checkpoints} checkpoints"
    return None


def _run_average(arguments: argparse.Namespace) -> ExitCode:
    from hlat.checkpoint import averaging, checkpoint_signature, checkpoint_store
    from hlat.storage import output_directory, storage_path
    from hlat.storage.progress_bar import ProgressBar

    sign = checkpoint_signature.load_signer(arguments.signing_key)
    run = storage_path.parse_storage_path(arguments.run)
    paths = averaging.select_checkpoints(run, arguments.steps, arguments.last)
    weights = arguments.weights or [1.0] * len(paths)
    if arguments.steps is not None:  # weights are in the order in which the steps were typed
        weights = [weight for _, weight in sorted(zip(arguments.steps, weights, strict=True))]
    is_job = rank_environment.RDZV_ENDPOINT_ENV in os.environ
    if is_job and arguments.output is not None and checkpoint_store.is_checkpoint(arguments.output):
        print(f"{arguments.output} exists; it was written by an earlier attempt")
        return ExitCode.FINISHED
    if arguments.output is not None:
        output_directory.validate_output_is_new(arguments.output)
    dtype = None if arguments.dtype is None else Dtype(arguments.dtype)
    with closing(ProgressBar("verifying", averaging.compute_num_bytes(paths))) as progress:
        checkpoints = [
            averaging.load_weighted_checkpoint(path, weight, progress.add, arguments.trusted_keys)
            for path, weight in zip(paths, weights, strict=True)
        ]
    averaging.validate_same_model(checkpoints, dtype)
    output = arguments.output or averaging.build_default_output(run, checkpoints, dtype)
    output_directory.validate_output_is_new(output)
    num_bytes = averaging.compute_average_bytes(checkpoints, dtype)
    with closing(ProgressBar("averaging", num_bytes)) as progress:
        averaging.write_average(output, checkpoints, dtype, progress.add, sign)
    for checkpoint in checkpoints:
        print(f"{checkpoint.path}  weight {checkpoint.weight:g}")
    print(f"averaged to {output}")
    print(f"export it:  hlat export {output} output=DIR")
    return ExitCode.FINISHED


def _parse_weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= _MAX_WEIGHT:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number above zero, of {_MAX_WEIGHT:g} or less"
        )
    return weight


if __name__ == "__main__":
    run_and_exit(main)
