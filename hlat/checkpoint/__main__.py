"""List, verify, prune or sign the checkpoints of a run: `hlat checkpoint`.

A run saves, verifies and prunes by itself. This command shows what exists, finds checkpoints that a
disk damaged, and frees space.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import (
    CommandLineParser,
    parse_positive_int,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hlat.checkpoint.checkpoint_listing import CheckpointInfo
    from hlat.checkpoint.checkpoint_signature import Signer
    from hlat.storage.storage_path import StoragePath

_EXAMPLES = """\
examples:
  hlat checkpoint ls runs/x                        list checkpoints
  hlat checkpoint verify runs/x                    read all of them and compare checksums
  hlat checkpoint verify runs/x step=200           only the checkpoint of step 200
  hlat checkpoint prune runs/x keep_last=3         print what would be removed
  hlat checkpoint prune runs/x keep_last=3 keep_every_steps=1000 yes=true
  hlat checkpoint keygen key.pem                   create key.pem (private) and key.pem.pub (public)
  hlat checkpoint sign runs/x signing_key=key.pem  verify all of them and sign them
  hlat checkpoint verify runs/x trusted_keys=key.pem.pub"""

_TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_ROW_FORMAT = "{:>{}}  {:>{}}  {:{}}  {:>{}}  {:>{}}  {:{}}  {:{}}  {:{}}"
_SETTINGS_OF = {
    "ls": ("json",),
    "verify": ("step", "trusted_keys"),
    "prune": ("keep_last", "keep_every_steps", "yes"),
    "sign": ("step", "signing_key"),
    "keygen": (),
}
"""Settings of each action."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the action; return the exit code."""
    parser = _build_parser()
    arguments = parser.parse(argv)
    if problem := _find_usage_error(arguments):
        parser.error(problem)
    return run_command(lambda: _dispatch(arguments), arguments.run)


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "checkpoint", "List, verify, prune or sign the checkpoints of a run.", _EXAMPLES
    )
    add = parser.add_argument
    add("action", choices=tuple(_SETTINGS_OF), help="what to do")
    run = (
        "directory of a run; ls, verify and sign: or a checkpoint, or a URL; keygen: file to write"
    )
    add("run", metavar="RUN", help=run)
    add("--json", action="store_true", help="ls: print a JSON list")
    add("--step", type=int, metavar="N", help="verify, sign: only this step")
    keep = "prune: number of newest checkpoints to keep"
    add("--keep-last", type=parse_positive_int, metavar="N", help=keep)
    every = "prune: keep every checkpoint whose step is a multiple of M"
    add("--keep-every-steps", type=parse_positive_int, metavar="M", help=every)
    trusted = "verify: require signatures by one of the public keys in FILE"
    add("--trusted-keys", metavar="FILE", help=trusted)
    add("--signing-key", metavar="FILE", help="sign: private key")
    add("--yes", action="store_true", help="prune: remove; default: print what would be removed")
    return parser


def _find_usage_error(arguments: argparse.Namespace) -> str | None:
    """Return the problem of settings that do not belong to the action."""
    for action, names in _SETTINGS_OF.items():
        for name in names:
            if name not in _SETTINGS_OF[arguments.action] and getattr(arguments, name):
                return f"{name}= is a setting of {action}, not of {arguments.action}"
    if arguments.action == "prune" and arguments.keep_last is None:
        return "prune needs keep_last=N"
    if arguments.action == "sign" and arguments.signing_key is None:
        return "sign needs signing_key=FILE; create one with: hlat checkpoint keygen FILE"
    return None


def _dispatch(arguments: argparse.Namespace) -> int:
    from hlat.checkpoint import checkpoint_signature
    from hlat.storage import storage_path

    if arguments.action == "keygen":
        public_path = checkpoint_signature.create_key_pair(Path(arguments.run))
        print(f"{arguments.run}: private key, checkpoint.signing_key; keep it secret")
        print(f"{public_path}: public key, checkpoint.trusted_keys")
        return ExitCode.FINISHED
    run = storage_path.parse_storage_path(arguments.run)
    if arguments.action == "ls":
        return _print_checkpoints(run, arguments.json)
    if arguments.action == "verify":
        if arguments.trusted_keys is not None:
            checkpoint_signature.load_trusted_keys(arguments.trusted_keys)
        return _verify_checkpoints(run, arguments.step, arguments.trusted_keys)
    if arguments.action == "sign":
        sign = checkpoint_signature.load_signer(arguments.signing_key)
        return _verify_checkpoints(run, arguments.step, None, sign)
    if not isinstance(run, Path):
        raise ConfigError(f"{run}: prune needs the directory of the run, to see whether it trains")
    return _prune_run(run, (arguments.keep_last, arguments.keep_every_steps), arguments.yes)


def _print_checkpoints(run_dir: "StoragePath", as_json: bool) -> int:
    from hlat.checkpoint import checkpoint_listing

    entries = checkpoint_listing.list_checkpoints(run_dir)
    if as_json:
        rows_json = [vars(entry) | {"path": str(entry.path)} for entry in entries]
        print(json.dumps(rows_json, indent=1))
        return ExitCode.FINISHED
    header = ("step", "tokens", "written", "age", "size", "kind", "state", "")
    rows = [header, *(_format_row(entry, run_dir) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(_ROW_FORMAT.format(*chain(*zip(row, widths, strict=True))).rstrip())
    return ExitCode.FINISHED


def _format_row(checkpoint: "CheckpointInfo", run_dir: "StoragePath") -> tuple[str, ...]:
    from hlat.storage.progress_bar import format_bytes

    return (
        "?" if checkpoint.step is None else str(checkpoint.step),
        "?" if checkpoint.tokens is None else f"{checkpoint.tokens:,}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.written)),
        _format_age(time.time() - checkpoint.written),
        format_bytes(checkpoint.num_bytes),
        checkpoint.kind or "?",
        checkpoint.state,
        _format_name(checkpoint.path, run_dir),
    )


def _format_age(seconds: float) -> str:
    """Return a duration in its largest unit, such as `3 h`."""
    size, unit = next((u for u in _TIME_UNITS if seconds >= u[0]), _TIME_UNITS[-1])
    return f"{max(0, int(seconds // size))} {unit}"


def _format_name(path: "StoragePath", run_dir: "StoragePath") -> str:
    """Return a path relative to the run, with unprintable characters escaped."""
    name = str(path).removeprefix(f"{run_dir}/")
    return name if name.isprintable() else repr(name)


def _verify_checkpoints(
    run_dir: "StoragePath",
    step: int | None,
    trusted_keys: str | None,
    sign: "Signer | None" = None,
) -> int:
    """Verify all checkpoints but those that are being written or were set aside, as a resume.

    With `sign`, valid ones are signed.
    """
    from hlat.checkpoint import (
        checkpoint_listing,
        checkpoint_lookup,
        checkpoint_store,
        training_checkpoint,
    )
    from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
    from hlat.distributed.object_group import SingleRankGroup
    from hlat.storage.progress_bar import ProgressBar, print_line

    entries = checkpoint_listing.list_checkpoints(run_dir)
    entries = [e for e in entries if e.path == run_dir or checkpoint_listing.is_active(e.path)]
    if not entries:
        raise checkpoint_lookup.build_no_checkpoint_error(run_dir)
    chosen = [entry for entry in entries if step in (None, entry.step)]
    if not chosen:
        steps = ", ".join(str(entry.step) for entry in entries)
        raise ConfigError(f"step={step}: {run_dir} has checkpoints of steps {steps} only")
    num_wrong, group = 0, SingleRankGroup()
    with closing(ProgressBar("verifying", sum(entry.num_bytes for entry in chosen))) as progress:
        for entry in chosen:
            try:
                found = checkpoint_lookup.verify_on_all_ranks(
                    entry.path, group, progress.add, trusted_keys
                )
                training_checkpoint.load_training_state(found, group)
                if sign is not None:
                    checkpoint_store.sign_checkpoint(entry.path, sign)
                result = "ok" if sign is None else "signed"
                print_line(f"{_format_name(entry.path, run_dir)}: {result}")
            except CorruptCheckpointError as error:
                num_wrong += 1
                print_line(f"{_format_name(entry.path, run_dir)}: {error}")
    return ExitCode.FAILED if num_wrong else ExitCode.FINISHED


def _prune_run(run_dir: Path, keep: tuple[int, int | None], confirmed: bool) -> int:
    from hlat.checkpoint import checkpoint_directory, checkpoint_lookup
    from hlat.tracking import run_directory

    root = checkpoint_lookup.find_checkpoint_root(run_dir)
    if not (root / "checkpoints").is_dir():
        raise checkpoint_lookup.build_no_checkpoint_error(run_dir)
    checkpoint_directory.validate_ownership(run_dir, root)
    try:
        with run_directory.lock_run_dir(run_dir) if confirmed else nullcontext():
            return _prune_or_preview(root, keep, confirmed)
    except BlockingIOError as error:
        raise ConfigError(
            f"{run_dir}: a run is training there and prunes by itself; wait until it ends"
        ) from error


def _prune_or_preview(
    checkpoint_root: "StoragePath", keep: tuple[int, int | None], confirmed: bool
) -> int:
    from hlat.checkpoint import checkpoint_listing, checkpoint_lookup, retention
    from hlat.storage.progress_bar import ProgressBar, format_bytes

    directory = checkpoint_root / "checkpoints"
    sizes = {
        entry.path: entry.num_bytes for entry in checkpoint_listing.list_checkpoints(directory)
    }
    with closing(ProgressBar("verifying the newest", [*sizes.values()][-1])) as progress:
        found, refused = checkpoint_lookup.find_newest_checkpoint(
            directory, on_progress=progress.add
        )
    for reason in refused:
        print(f"WARNING: {reason}", file=sys.stderr)
    if found is None:
        print(f"{checkpoint_root} has no valid checkpoint; nothing is removed", file=sys.stderr)
        return ExitCode.FAILED
    if confirmed:
        removed = retention.prune_checkpoints(directory, *keep, verified=found.path)
    else:
        removed = retention.list_prunable(directory, found.path, *keep)
    verb = "removed" if confirmed else "would remove"
    for path in removed:
        print(f"{verb} {_format_name(path, checkpoint_root)}  {format_bytes(sizes.get(path, 0))}")
    total = format_bytes(sum(sizes.get(path, 0) for path in removed))
    hint = "" if confirmed or not removed else "; this was a dry run: yes=true removes them"
    print(f"{verb} {len(removed)} of {len(sizes)} in {checkpoint_root}, {total}{hint}")
    return ExitCode.FINISHED


if __name__ == "__main__":
    run_and_exit(main)
