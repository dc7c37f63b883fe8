"""Selection and loading of the checkpoint from which a run resumes.

The run directory takes precedence over checkpoint.start_from and model.init_from, so a restart
never rewinds a run to its origin.
"""

import dataclasses
from pathlib import Path
from typing import Any

from hlat.checkpoint import (
    checkpoint_directory,
    checkpoint_lookup,
    checkpoint_store,
    rollback_log,
    training_checkpoint,
)
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_lookup import VerifiedCheckpoint
from hlat.checkpoint.checkpoint_manifest import CheckpointManifest
from hlat.checkpoint.hugging_face import pretrained_weights
from hlat.checkpoint.start_validation import (
    find_replaced_start,
    find_start_problems,
    load_digest,
)
from hlat.checkpoint.training_state import TrainingState
from hlat.config import extensions, run_identity
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps, count_readable_batches
from hlat.data.data_loader import DataLoader
from hlat.data.prompt_tokenizer import find_added_bos_token
from hlat.distributed.object_group import ObjectGroup, broadcast_object, run_on_rank0
from hlat.engine import state_shards
from hlat.engine.interface import Engine
from hlat.model.decoder_spec import list_parameter_specs
from hlat.optim.optimizer_spec import list_weight_copies
from hlat.storage.storage_path import StoragePath, parse_storage_path
from hlat.tracking import finished_runs
from hlat.tracking.run_directory import EXTENSIONS_DIR
from hlat.tracking.tracker import Tracker


def resume(
    config: Config, run_dir: Path, engine: Engine, loader: DataLoader, tracker: Tracker
) -> TrainingState:
    """Load engine and loader from the newest checkpoint, and start the attempt in the log.

    Without a checkpoint, the weights are initialized or loaded from model.init_from.

    Raises:
        ConfigError: The checkpoint has other fixed settings or other data, the weights of
            model.init_from do not fit the model, or the run started from another checkpoint than
            checkpoint.start_from names now.
    """
    initial = TrainingState(
        fixed=run_identity.collect_fixed_settings(config),
        adjustable=run_identity.collect_adjustable_settings(config),
    )
    destination = config.checkpoint.destination
    root = checkpoint_directory.build_checkpoint_root(run_dir, destination)
    checkpoints_dir = root / "checkpoints"
    group = engine.parallel_state.world_group
    checkpoint, refused = _find_checkpoint(config, checkpoints_dir, group)
    for reason in refused:
        tracker.print_message(f"WARNING: {reason}")
    details: dict[str, Any] = {"refused": refused} if refused else {}
    if checkpoint is None:
        tracker.print_message(f"new run in {run_dir}")
        details |= _load_initial_weights(config, engine, tracker)
        tracker.start_attempt(0, {}, **details)
        _print_proportions(loader, tracker)
        return dataclasses.replace(initial, tracker=tracker.service_run_ids)
    path, manifest = checkpoint.path, checkpoint.manifest
    state = training_checkpoint.load_training_state(checkpoint, group)
    is_same_run = path.parent == checkpoints_dir
    if is_same_run and (
        problem := run_on_rank0(group, lambda: find_replaced_start(config, run_dir))
    ):
        raise ConfigError(problem)
    if problems := find_start_problems(config, state, str(path), is_same_run):
        action = "resume from" if is_same_run else "start from checkpoint.start_from at"
        raise ConfigError(*(f"cannot {action} {path}: {problem}" for problem in problems))
    changed = run_identity.find_differences(state.adjustable, initial.adjustable)
    changed += loader.load_state_dict(state.data)
    changed += extensions.describe_changes(run_dir / EXTENSIONS_DIR, config.extensions)
    num_readable = count_readable_batches(config) + loader.num_skipped_batches
    rollbacks = rollback_log.load_rollbacks(checkpoints_dir, num_readable, group, tracker)
    loader.skip_batches(rollback.skipped for rollback in rollbacks)
    changed += _load_state(config, engine, path, manifest)
    if state.step < compute_total_steps(config):
        prefix = "resuming from " if is_same_run else "starting from checkpoint.start_from="
        tracker.print_message("\n  ".join([f"{prefix}{path}", *changed]))
    details |= {"changed": changed} if changed else {}
    details[finished_runs.START_DIGEST] = run_on_rank0(group, lambda: load_digest(path))
    is_own = is_same_run and state.step > finished_runs.get_copied_steps(run_dir)
    service_run_ids = state.tracker if is_own else None  # a branch is a new run in services
    tracker.start_attempt(state.step, service_run_ids, checkpoint=str(path), **details)
    if state.step < compute_total_steps(config):
        _print_proportions(loader, tracker)
    return dataclasses.replace(
        initial, step=state.step, tokens=state.tokens, tracker=tracker.service_run_ids
    )


def _load_state(
    config: Config, engine: Engine, path: StoragePath, manifest: CheckpointManifest
) -> list[str]:
    """Load the state of a checkpoint; return a line for each tensor that it lacks."""
    parameters, settings = list_parameter_specs(config.model), config.optimizer
    fresh = training_checkpoint.list_fresh_state(parameters, settings, manifest)
    restarted = training_checkpoint.list_restarted_parameters(parameters, settings, manifest)
    new = {f"{tensor.name}/{name}" for tensor, names in fresh.items() for name in names}
    omitted = new | {f"updates/{name}" for name in restarted}
    shards = (shard for shard in engine.state_shards() if shard.name not in omitted)
    checkpoint_store.load_checkpoint(path, shards, manifest)
    state_shards.copy_weights(engine.state_shards(), new & list_weight_copies(settings, parameters))
    return [
        f"{tensor.name} of {len(names)} parameters starts "
        f"{'as the weights' if tensor.is_weights else 'at zero'}, as the checkpoint has none for "
        "these settings"
        for tensor, names in fresh.items()
    ]


def _print_proportions(loader: DataLoader, tracker: Tracker) -> None:
    """Print the fraction of tokens of each source, as weights are relative to each other.

    A line per source follows if the tokenizer loses a part of its text.
    """
    shares = [f"{name} {share:.1%}" for name, share in loader.next_proportions.items()]
    lines = [f"data: {', '.join(shares)} of tokens", *loader.lost_text_notes()]
    tracker.print_message("\n".join(lines))


def _load_initial_weights(config: Config, engine: Engine, tracker: Tracker) -> dict[str, str]:
    """Initialize the weights, or load those of model.init_from; return the details to log."""
    source = config.model.init_from
    if source is None:
        engine.init_weights()
        return {}
    if config.checkpoint.trusted_keys is not None:
        raise ConfigError(
            f"model.init_from={source} has no signature, and checkpoint.trusted_keys="
            f"{config.checkpoint.trusted_keys} is set; start from a signed checkpoint with "
            "checkpoint.start_from, or set checkpoint.trusted_keys after the first checkpoint"
        )
    group = engine.parallel_state.world_group
    # Rank 0 decides, because a run that still saves there may complete a tag in the meantime
    directory = broadcast_object(
        group, pretrained_weights.find_weights_dir(source) if group.is_rank0 else ""
    )
    digest = pretrained_weights.load_pretrained(
        directory, config.model, engine.state_shards(), config.run.resolved_init_seed
    )
    copies = list_weight_copies(config.optimizer, list_parameter_specs(config.model))
    state_shards.copy_weights(engine.state_shards(), copies)
    noise = config.model.mlp.moe.upcycling_noise
    experts = "" if noise is None else f"; experts are copies of the dense network, noise {noise:g}"
    tracker.print_message(f"starting from the weights in {directory}{experts}")
    bos_token = find_added_bos_token(Path(source).expanduser()) if group.is_rank0 else None
    if bos_token not in (None, config.data.bos_token):
        tracker.print_message(
            f"WARNING: the tokenizer of model.init_from={source} adds {bos_token} before each "
            f"text, but data.bos_token={config.data.bos_token or 'null'}; to start documents with "
            f"this token, start a new run with 'data.bos_token=\"{bos_token}\"'"
        )
    return {"init_from": directory, "init_from_fingerprint": digest}


def _find_checkpoint(
    config: Config, checkpoints_dir: StoragePath, world_group: ObjectGroup
) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Return the checkpoint to load, if any, and the reasons for refusing newer ones."""
    trusted_keys = config.checkpoint.trusted_keys
    newest, refused = checkpoint_lookup.find_newest_checkpoint(
        checkpoints_dir, process_group=world_group, trusted_keys=trusted_keys
    )
    if newest is None and refused:
        raise ConfigError(
            *refused,
            f"{checkpoints_dir.parent} has no valid checkpoint; move {checkpoints_dir} away to "
            "start from step 0",
        )
    if newest is None and config.checkpoint.start_from is not None:
        return _find_start(config.checkpoint.start_from, world_group, trusted_keys)
    return newest, refused


def _find_start(
    start_from: str, world_group: ObjectGroup, trusted_keys: str | None
) -> tuple[VerifiedCheckpoint, list[str]]:
    """Return the checkpoint of checkpoint.start_from, and the reasons for refusing newer ones.

    Raises:
        ConfigError: It is neither a valid checkpoint nor a run directory with one.
    """
    source = parse_storage_path(start_from, "checkpoint.start_from")
    setting, steps = f"checkpoint.start_from={source}", ""
    try:
        is_checkpoint = world_group.any(
            world_group.is_rank0 and checkpoint_store.is_checkpoint(source)
        )
        if is_checkpoint:
            if found := checkpoint_directory.list_steps(source.parent):
                steps = f"; {source.parent} has the steps {', '.join(map(str, found))}"
            checkpoint = checkpoint_lookup.verify_on_all_ranks(
                source, world_group, trusted_keys=trusted_keys
            )
            return checkpoint, []
        root = checkpoint_lookup.find_checkpoint_root(source)
        newest, refused = checkpoint_lookup.find_newest_checkpoint(
            checkpoint_directory.find_checkpoints_dir(root),
            process_group=world_group,
            trusted_keys=trusted_keys,
        )
    except ConfigError as error:
        problems = "; ".join(error.problems)
        raise ConfigError(f"{setting}: {problems}{steps}") from error
    except (CorruptCheckpointError, OSError) as error:
        raise ConfigError(
            f"{setting}: {error}; set a run directory or the directory of a complete checkpoint"
            f"{steps}"
        ) from error
    if newest is None:
        problems = "; ".join(refused) or "it contains no checkpoint"
        raise ConfigError(f"{setting}: {problems}; set the directory of a run that has saved")
    return newest, refused
