"""Export a run's model in Hugging Face format: `hlat export`.

    run -> checkpoint (verified) -> weights, config.json, tokenizer -> a new directory

The output depends on the checkpoint only, not on the run's layout or machine; the tokenizer is
found by its hash.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config import run_identity
from hlat.config.argument_parser import (
    CommandLineParser,
    parse_size,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ExitCode, escape_control_characters
from hlat.config.precision import Dtype

if TYPE_CHECKING:
    from hlat.checkpoint.hugging_face.weight_export import ExportShard
    from hlat.checkpoint.training_settings import TrainingSettings
    from hlat.config.model import ModelConfig

_EXAMPLES = """\
examples:
  hlat export runs/x output=exported             the newest checkpoint of a run
  hlat export runs/x step=200 output=exported    the checkpoint of step 200
  hlat export runs/x/checkpoints/step_00000200 output=exported dtype=bf16
  hlat export s3://bucket/checkpoints/x output=exported

Then, in Python: AutoModelForCausalLM.from_pretrained("exported"). See docs/export.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the directory and print how to use it; return the exit code."""
    parser = _build_parser()
    arguments = parser.parse(argv)
    if arguments.output is None:
        parser.error("output=DIR is missing: the directory to write")
    unwritable = f"output={arguments.output} cannot be written"
    interrupted = f"interrupted; no part of {arguments.output} was written"
    return run_command(lambda: _export(arguments), unwritable, interrupted)


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "export",
        "Write weights, config.json and tokenizer of a run in Hugging Face format.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("source", metavar="RUN", help="directory or URL of a run or of one of its checkpoints")
    add("--output", type=Path, metavar="DIR", help="new directory to write")
    add("--step", type=int, metavar="N", help="checkpoint of the run (default: the newest)")
    dtypes = [dtype.value for dtype in Dtype]
    add("--dtype", choices=dtypes, help="dtype of the files (default: that of the run's weights)")
    size = "maximum size of a file (default: 5GB)"
    add("--max-shard-size", type=parse_size, default="5GB", metavar="SIZE", help=size)
    parser.add_ema()
    finite = "export weights that are NaN or infinite"
    add("--allow-non-finite", action="store_true", help=finite)
    trusted = "require a signature by one of the public keys in FILE"
    add("--trusted-keys", metavar="FILE", help=trusted)
    tokenizer = "the run's tokenizer.json, if it was moved"
    add("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
    parser.add_extensions()
    return parser


def _export(arguments: argparse.Namespace) -> ExitCode:
    from hlat.checkpoint import (
        checkpoint_lookup,
        checkpoint_store,
        training_checkpoint,
        training_settings,
    )
    from hlat.checkpoint.hugging_face import pretrained_files, tokenizer_files, weight_export
    from hlat.checkpoint.training_state import TrainingState
    from hlat.data.tokenizer import Tokenizer
    from hlat.model.decoder_spec import count_parameters
    from hlat.model.families import hugging_face_config
    from hlat.storage import output_directory, storage_path

    output = arguments.output
    output_directory.validate_output_is_new(output)
    source = storage_path.parse_storage_path(arguments.source)
    checkpoint, refused = checkpoint_lookup.find_checkpoint(
        source, arguments.step, arguments.trusted_keys
    )
    for reason in refused:
        print(f"WARNING: {reason}", file=sys.stderr)
    state = TrainingState.from_json(checkpoint_store.load_state_json(checkpoint))
    model = run_identity.build_saved_model_config(state.fixed, state.config)
    weight_export.validate_weights_match(checkpoint, model)
    weight_export.validate_buffers(checkpoint, model)
    known = training_settings.parse_training_settings(checkpoint, state)
    run, length = training_settings.find_run_dir(source, checkpoint), known.sequence_length
    file = training_settings.find_tokenizer(
        arguments.tokenizer, checkpoint, run, known.tokenizer_sha256
    )
    tokenizer = Tokenizer(
        str(file), ".", known.eos_token, bos_token=known.bos_token, max_lost_text=1.0
    )
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    dtype = Dtype(arguments.dtype or known.dtype)
    config = hugging_face_config.build_hf_config(model, length, eos, dtype, bos)
    source_files = pretrained_files.load_pretrained_files(
        model.init_from, run, known.tokenizer_sha256
    )
    if source_files.warning:
        print(f"WARNING: {escape_control_characters(source_files.warning)}", file=sys.stderr)
    documents = {
        **tokenizer_files.build_tokenizer_files(
            file, known.eos_token, length, source_files.tokenizer_config, known.bos_token
        ),
        "generation_config.json": _serialize_json(source_files.build_generation_config(eos, bos)),
        "config.json": _serialize_json(config),
        **source_files.documents,
    }
    print(
        f"{checkpoint}: step {state.step}, {count_parameters(model):,} parameters in {dtype.value}"
    )
    files = weight_export.split_into_shards(model, dtype, arguments.max_shard_size)
    weight_export.export_weights(
        output,
        checkpoint,
        files,
        dtype,
        documents,
        _print_shard,
        arguments.allow_non_finite,
        training_checkpoint.find_weights_key(state, checkpoint, arguments.ema),
    )
    print(f"exported to {output}")
    print(f"load it:   AutoModelForCausalLM.from_pretrained({str(output)!r})")
    print(f"train on:  {_format_train_command(output, model, known)}")
    return ExitCode.FINISHED


def _print_shard(shard: "ExportShard") -> None:
    from hlat.storage.progress_bar import format_bytes

    print(f"  {shard.name}  {format_bytes(shard.num_bytes)}", flush=True)


def _serialize_json(content: dict[str, object]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _format_train_command(output: Path, model: "ModelConfig", known: "TrainingSettings") -> str:
    """Return the command that continues training from `output`."""
    from hlat.config.model_overrides import format_model_overrides, format_override

    settings = {
        "model.init_from": str(output),
        "data.tokenizer": str(output.absolute() / "tokenizer.json"),
        "data.eos_token": known.eos_token,
        **({} if known.bos_token is None else {"data.bos_token": known.bos_token}),
    }
    overrides = [format_override(key, value) for key, value in settings.items()]
    return shlex.join(["hlat", "train", *format_model_overrides(model), *overrides])


if __name__ == "__main__":
    run_and_exit(main)
