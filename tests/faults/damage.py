"""Trials that damage the newest checkpoint of a trained run.

`reject_damage` calls the functions that a resume uses. `resume_after_damage` starts the run again.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.faults import damage
from hlat.checkpoint import checkpoint_lookup, checkpoint_store, training_checkpoint
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.safetensors_file import DTYPES_BY_NAME
from hlat.distributed.object_group import SingleRankGroup
from hlat.distributed.state_shard import StateShard
from tests.faults import trials
from tests.support.sealed_checkpoint import seal_checkpoint

RUN = (*trials.build_run_overrides(12, 4), "checkpoint.keep_last=3")
TRIALS_PER_CALL = 125
Edit = Callable[[Path, random.Random], None]


def _edit_state(key: str, value: object) -> Edit:
    def edit(path: Path, rng: random.Random) -> None:
        state = json.loads((path / "state.json").read_bytes()) | {key: value}
        (path / "state.json").write_text(json.dumps(state))

    return edit


def _edit_header(old: bytes, new: bytes) -> Edit:
    def edit(path: Path, rng: random.Random) -> None:
        file = rng.choice(sorted(path.glob("*.safetensors")))
        file.write_bytes(file.read_bytes().replace(old, new))

    return edit


RESEALED: dict[str, Edit] = {
    "another step, sealed": _edit_state("step", 11),
    "no data position, sealed": _edit_state("data", {}),
    "no model, sealed": _edit_state("fixed", {}),
    "another dtype, sealed": _edit_header(b'"dtype": "F32"', b'"dtype": "I32"'),
    "other names, sealed": _edit_header(b"weights/model.", b"weights/molde."),
}
"""Edits after which all hashes are computed again."""
KINDS = (*damage.KINDS, *RESEALED)


def reject_damage(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Damage copies of the newest checkpoint; each must be rejected and the previous one loaded."""
    reference, _ = workspace.reference(*RUN, *trials.LAYOUTS[layout])
    directory = workspace.folder / f"damaged-{layout}"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(reference.checkpoints(), directory)
    previous, newest = sorted(directory.iterdir())[-2:]
    pristine = reference.checkpoints() / newest.name
    outcomes = []
    for _ in range(workspace.limit(TRIALS_PER_CALL)):
        damage_name = rng.choice(KINDS)
        _damage(newest, previous, damage_name, rng)
        problem = _find_problem(
            directory, newest, previous, reference.checkpoints() / previous.name
        )
        outcomes.append(f"{layout}: {damage_name}: {problem}" if problem else "")
        shutil.rmtree(newest)
        shutil.copytree(pristine, newest)
    shutil.rmtree(directory)
    return outcomes


def resume_after_damage(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Damage the newest checkpoint of a run and resume it."""
    overrides = (*RUN, *trials.LAYOUTS[layout])
    reference, _ = workspace.reference(*overrides)
    run = workspace.new_run(*overrides)
    if code := run.finish("run.steps=8"):
        return [f"{run.name}: exit code {code}"]
    previous, newest = sorted(run.checkpoints().iterdir())[-2:]
    damage_name = rng.choice([*damage.KINDS])
    _damage(newest, previous, damage_name, rng)
    run.start()
    problems = trials.finish_and_compare(run, reference)
    refused = [reason for row in run.events("resume") for reason in row.get("refused", ())]
    if not any(newest.name in reason for reason in refused):
        problems.append(f"{run.name}: {newest.name} was not reported ({damage_name})")
    return ["; ".join(problems)]


def _damage(newest: Path, previous: Path, damage_name: str, rng: random.Random) -> None:
    """Damage a checkpoint in one of the ways."""
    if damage_name in damage.KINDS:
        act, choose = damage.KINDS[damage_name]
        act(choose(newest, rng), previous, rng)
        return
    RESEALED[damage_name](newest, rng)
    seal_checkpoint(newest)


def _find_problem(directory: Path, newest: Path, previous: Path, pristine: Path) -> str:
    """Return what is wrong with the rejection; empty if nothing is."""
    group = SingleRankGroup()
    found, refused = checkpoint_lookup.find_newest_checkpoint(directory)
    if found is not None and found.path == newest:
        try:
            training_checkpoint.load_training_state(found, group)
        except CorruptCheckpointError as error:
            return "" if str(newest) in str(error) else f"no file name in {error}"
        return "accepted"
    if found is None or found.path != previous:
        return f"{previous.name} was not used"
    if len(refused) != 1 or newest.name not in refused[0]:
        return f"no file name in {refused}"
    training_checkpoint.load_training_state(found, group)
    return "" if _load(previous) == _load(pristine) else f"{previous.name} was loaded wrongly"


def _load(path: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of a checkpoint."""
    manifest = checkpoint_store.load_manifest(path)
    tensors = {
        name: torch.empty(record.shape, dtype=DTYPES_BY_NAME[record.dtype])
        for name, record in manifest.tensors.items()
    }
    shards = [
        StateShard(name, shape := tuple(tensor.shape), (0,) * len(shape), shape, tensor)
        for name, tensor in tensors.items()
    ]
    checkpoint_store.load_checkpoint(path, shards, manifest)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
