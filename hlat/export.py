"""Writes a run's model as a Hugging Face folder: `python -m hlat.export`.

    run -> checkpoint (verified) -> model, tokenizer -> folder, complete or not there at all

What is written follows from the checkpoint alone, so neither the run's layout nor the machine that
trained it matters; the tokenizer is found again by its hash.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config import identity
from hlat.config.arguments import Parser, leave
from hlat.config.errors import ConfigError, Exit
from hlat.config.precision import Dtype

if TYPE_CHECKING:
    from hlat.checkpoint.export import Shard

_EXAMPLES = """\
examples:
  python -m hlat.export runs/x --output exported             the newest checkpoint of a run
  python -m hlat.export runs/x --step 200 --output exported  another one
  python -m hlat.export runs/x/checkpoints/step_00000200 --output exported --dtype bf16
  python -m hlat.export s3://bucket/checkpoints/x --output exported

Then, in Python: AutoModelForCausalLM.from_pretrained("exported"). docs/export.md tells more."""

_INTERRUPTED = 130
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m hlat.export",
        description="Write weights, config.json and tokenizer of a run as a Hugging Face folder.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("source", metavar="RUN", help="folder or URL of a run, or of one of its checkpoints")
    add("--output", type=Path, metavar="DIR", help="folder to write; it must be new")
    add("--step", type=int, metavar="N", help="checkpoint of the run (default: the newest)")
    kinds = [dtype.value for dtype in Dtype]
    add("--dtype", choices=kinds, help="dtype of the files (default: that of the run's weights)")
    add(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="most weights in a file (default: 5GB)",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="the run's tokenizer.json, if it has moved")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder and print how to use it; return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.output is None:
        parser.error("where to write is missing: give --output DIR")
    from hlat.checkpoint.remote import UnansweredError

    try:
        _export(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    except UnansweredError as error:
        print(error, file=sys.stderr)
        return Exit.FAILED
    except OSError as error:
        reason = error.strerror or error
        print(f"--output {arguments.output} cannot be written ({reason})", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        print(f"\ninterrupted; nothing of {arguments.output} is left", file=sys.stderr)
        return _INTERRUPTED
    return Exit.FINISHED


def _export(arguments: argparse.Namespace) -> None:
    from hlat.checkpoint import export, lookup, new_folder, places, store, trained_with
    from hlat.data import hugging_face as tokenizer_folder
    from hlat.data.tokenizer import Tokenizer
    from hlat.model import hugging_face
    from hlat.model.canonical import num_parameters
    from hlat.state import TrainingState

    output = arguments.output
    new_folder.refuse_existing(output)
    source = places.at(arguments.source)
    checkpoint, refused = lookup.find(source, arguments.step)
    for reason in refused:
        print(f"WARNING: {reason}", file=sys.stderr)
    state = TrainingState.from_json(store.load_state(checkpoint))
    model = identity.model(state.fixed)
    export.refuse_other_weights(checkpoint, model)
    known = trained_with.circumstances(checkpoint, state)
    run, length = trained_with.run_folder(source, checkpoint), known.sequence_length
    file = trained_with.tokenizer(arguments.tokenizer, checkpoint, run, known.tokenizer_sha256)
    eos = Tokenizer(str(file), ".", known.eos_token).eos
    dtype = Dtype(arguments.dtype or known.dtype)
    config = hugging_face.to_config(model, length, eos, dtype)
    documents = {
        **tokenizer_folder.documents(file, known.eos_token, length),
        "generation_config.json": _json({"eos_token_id": eos, "pad_token_id": eos}),
        "config.json": _json(config),
    }
    print(f"{checkpoint}: step {state.step}, {num_parameters(model):,} parameters in {dtype.value}")
    files = export.shards(model, dtype, arguments.max_shard_size)
    export.write(output, checkpoint, files, dtype, documents, _tell)
    print(f"exported to {output}")
    print(f"load it:   AutoModelForCausalLM.from_pretrained({str(output)!r})")
    print(f"train on:  {_command(output, known.eos_token)}")


def _tell(file: "Shard") -> None:
    from hlat.data.preparation.progress import format_bytes

    print(f"  {file.name}  {format_bytes(file.num_bytes)}", flush=True)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no size; write it as 5GB or 500MB")
    return int(match[1]) * _UNITS[match[2]]


def _json(content: dict[str, object]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _command(output: Path, eos_token: str) -> str:
    """What to type to train on from the folder."""
    settings = {
        "model.init_from": str(output),
        "data.tokenizer": str(output.absolute() / "tokenizer.json"),
        "data.eos_token": eos_token,
    }
    words = [f"{key}={_quoted(value)}" for key, value in settings.items()]
    return shlex.join(["python", "-m", "hlat.train", *words])


def _quoted(value: str) -> str:
    """A value as an override takes it."""
    return value if re.fullmatch(r"[\w./-]+", value) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    leave(main)
