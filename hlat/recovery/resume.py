"""Finds the state that a run goes on from.

A run looks into its own folder first and at checkpoint.start_from or model.init_from only when
that holds nothing, so a restart never rewinds a run to what it once began from.
"""

import dataclasses
from pathlib import Path
from typing import Any

from hlat.checkpoint import places, pretrained, retention, store
from hlat.checkpoint.places import Place
from hlat.config import identity
from hlat.config.errors import ConfigError
from hlat.config.run import Config
from hlat.data.loader import Loader
from hlat.engine.interface import Engine, World
from hlat.parallelism.group import Group, tell
from hlat.state import TrainingState, differences
from hlat.tracking.tracker import Tracker


def resume(
    config: Config, folder: Path, engine: Engine, loader: Loader, tracker: Tracker
) -> TrainingState:
    """Fill engine and loader from the checkpoint to go on from; open the attempt there.

    Without a checkpoint the engine keeps its initial weights, or gets those of model.init_from.

    Raises:
        ConfigError: The checkpoint belongs to a run with other fixed settings or other data, or
            model.init_from is not the model's.
    """
    fresh = TrainingState(fixed=identity.fixed(config), adjustable=identity.adjustable(config))
    everyone = engine.world.everyone
    saved = places.home(folder, config.checkpoint.destination) / "checkpoints"
    path, refused = _newest(config, saved, engine.world)
    for reason in refused:
        tracker.say(f"WARNING: {reason}")
    if path is None:
        tracker.begin(0, {}, **_told(refused=refused), **_begin(config, engine, tracker))
        return dataclasses.replace(fresh, tracker=tracker.identity)
    state = TrainingState.from_json(store.load_state(path))
    if state.weights_only:
        raise ConfigError(
            f"{path} holds weights only, and a run goes on with its optimizer and its place in the "
            f"data too; to begin a new one from the weights: python -m hlat.export {path} --output "
            "DIR, then model.init_from=DIR in place of checkpoint.start_from"
        )
    own = path.parent == saved
    if changed := differences(_inherited(state.fixed, own), fresh.fixed):
        raise ConfigError(
            *(
                f"{path} cannot go on: {line}; set it back or choose another run.name"
                for line in changed
            )
        )
    changed = differences(state.adjustable, fresh.adjustable)
    changed += loader.restore(state.data)
    loader.leave_out(batches_left_out(everyone, tracker))
    store.restore(path, engine.chunks())
    tracker.say(f"resuming from {path}" + "".join(f"\n  {line}" for line in changed))
    known_as = state.tracker if own else None  # a branch is another run wherever it is shown
    told = _told(changed=changed, refused=refused)
    tracker.begin(state.step, known_as, checkpoint=str(path), **told)
    return dataclasses.replace(
        fresh, step=state.step, tokens=state.tokens, tracker=tracker.identity
    )


def batches_left_out(everyone: Group, tracker: Tracker) -> list[range]:
    """The batches that rollbacks of this run have left out, on all ranks."""
    rows = tracker.events("rollback") if everyone.leads else []
    return [range(*batches) for batches in tell(everyone, [row["left_out"] for row in rows])]


def _begin(config: Config, engine: Engine, tracker: Tracker) -> dict[str, str]:
    """Give the engine the weights of model.init_from; return what the record should say of them."""
    origin = config.model.init_from
    if origin is None:
        return {}
    everyone = engine.world.everyone
    # A run that still saves there may complete a tag while the ranks look
    folder = tell(everyone, pretrained.found_in(origin) if everyone.leads else "")
    digest = pretrained.fill(folder, config.model, engine.chunks())
    tracker.say(f"starting from the weights in {folder}")
    return {"init_from": folder, "init_from_fingerprint": digest}


def _inherited(fixed: dict[str, Any], own: bool) -> dict[str, Any]:
    """Return the settings that bind a run; a branch need not name its trunk's origin."""
    return {key: value for key, value in fixed.items() if own or key not in identity.ORIGIN}


def _told(**lists: list[str]) -> dict[str, list[str]]:
    """Return the lists that say something."""
    return {name: sentences for name, sentences in lists.items() if sentences}


def _newest(config: Config, saved: Place, world: World) -> tuple[Place | None, list[str]]:
    """Return the checkpoint to go on from, and why newer ones were refused."""
    path, refused = retention.newest_valid(saved, everyone=world.everyone, rank=world.rank)
    if path is None and refused:
        raise ConfigError(
            *refused,
            f"{saved.parent} holds no valid checkpoint; move {saved} away to begin anew",
        )
    if path is None and config.checkpoint.start_from is not None:
        path = places.at(config.checkpoint.start_from, "checkpoint.start_from")
        try:
            problem = retention.problem_of(path, world.everyone, world.rank)
        except OSError as error:
            problem = str(error)
        if problem is not None:
            raise ConfigError(
                f"checkpoint.start_from={path}: {problem}; name a complete checkpoint folder"
            )
    return path, refused
