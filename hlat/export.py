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

from omegaconf import OmegaConf

from hlat.config import identity
from hlat.config.arguments import Parser, leave
from hlat.config.errors import ConfigError, Exit
from hlat.config.precision import Dtype

if TYPE_CHECKING:
    from hlat.checkpoint.export import Shard
    from hlat.checkpoint.places import Place
    from hlat.state import TrainingState

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
    from hlat.checkpoint import export, lookup, new_folder, places, store
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
    length, eos_token, sha256, saved_dtype = _settings(checkpoint, state)
    file = _tokenizer(arguments.tokenizer, checkpoint, _run_folder(source, checkpoint), sha256)
    eos = Tokenizer(str(file), ".", eos_token).eos
    dtype = Dtype(arguments.dtype or saved_dtype)
    config = hugging_face.to_config(model, length, eos, dtype)
    documents = {
        **tokenizer_folder.documents(file, eos_token, length),
        "generation_config.json": _json({"eos_token_id": eos, "pad_token_id": eos}),
        "config.json": _json(config),
    }
    print(f"{checkpoint}: step {state.step}, {num_parameters(model):,} parameters in {dtype.value}")
    files = export.shards(model, dtype, arguments.max_shard_size)
    export.write(output, checkpoint, files, dtype, documents, _tell)
    print(f"exported to {output}")
    print(f"load it:   AutoModelForCausalLM.from_pretrained({str(output)!r})")
    print(f"train on:  {_command(output, eos_token)}")


def _settings(checkpoint: "Place", state: "TrainingState") -> tuple[int, str, str, Dtype]:
    """Sequence length, EOS, hash of the tokenizer and dtype of the weights that were saved.

    Raises:
        ConfigError: The state lacks one of them.
    """
    try:
        data = state.data["fingerprint"]
        length, dtype = data["batch.sequence_length"], state.adjustable["precision.weights"]
        eos_token, sha256 = data["data.eos_token"], data["data.tokenizer"]
        if type(length) is not int or not isinstance(eos_token + sha256, str):
            raise TypeError(f"a sequence length of {length!r}, or other words than text")
        return length, eos_token, sha256, Dtype(dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{checkpoint}: state.json says nothing to go by ({error!r})") from error


def _tell(file: "Shard") -> None:
    from hlat.data.preparation.progress import format_bytes

    print(f"  {file.name}  {format_bytes(file.num_bytes)}", flush=True)


def _run_folder(source: "Place", checkpoint: "Place") -> Path | None:
    """The run's folder, if it is on this machine."""
    if isinstance(source, Path) and (source / "config.yaml").is_file():
        return source.absolute()
    return checkpoint.absolute().parent.parent if isinstance(checkpoint, Path) else None


def _tokenizer(given: Path | None, checkpoint: "Place", run: Path | None, sha256: str) -> Path:
    """Find the tokenizer.json that a checkpoint was trained with.

    A relative path of the run's configuration is looked for from here, then from the folders above
    the run, one of which it was started in.

    Raises:
        ConfigError: It is not there, or not the same file any more.
    """
    from hlat.data.hugging_face import find
    from hlat.data.tokenizer import EMBEDDED_FILE

    if given is not None:
        told, places = f"--tokenizer {given}", [given.expanduser()]
    elif run is not None and (run / "config.yaml").is_file():
        named = _named_tokenizer(run)
        told = f"data.tokenizer={named}"
        places = [EMBEDDED_FILE, *(above / named for above in (Path.cwd(), *run.parents))]
    else:
        told, places = "without the run's config.yaml, the embedded one", [EMBEDDED_FILE]
    if (found := find(sha256, places)) is None:
        raise ConfigError(
            f"{checkpoint} was trained with the tokenizer.json of sha256 {sha256}; {told} is not "
            "that file, or is not there; name it with --tokenizer FILE"
        )
    return found


def _named_tokenizer(run: Path) -> Path:
    """What the run's configuration says about its tokenizer.

    Raises:
        ConfigError: It says so by a variable that is not set here, or is no configuration.
    """
    try:
        config = OmegaConf.load(run / "config.yaml")
        root, name = (OmegaConf.select(config, key) for key in ("data.root", "data.tokenizer"))
        return Path(root).expanduser() / Path(name).expanduser()
    except Exception as error:  # those of YAML, of OmegaConf and of a file of another shape
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(f"{run / 'config.yaml'}: {reason}; use --tokenizer FILE") from error


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
