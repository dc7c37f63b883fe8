"""Checkpoint formats with one interface: save a state, load it or raise.

Each is used as its documentation recommends, with its safest loading function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Contestant:
    """A format.

    Attributes:
        name: Name in tables.
        save: Writes the state of a step into a new directory.
        load: Loads a directory or raises; the second argument has the expected shapes and dtypes.
    """

    name: str
    save: Callable[[Path, int, State], None]
    load: Callable[[Path, State], State]


def torch_save() -> Contestant:
    def save(folder: Path, step: int, state: State) -> None:
        folder.mkdir(parents=True)
        torch.save(state, folder / "state.pt")

    def load(folder: Path, like: State) -> State:
        found: State = torch.load(folder / "state.pt", weights_only=True)
        return found

    return Contestant("torch.save", save, load)


def safetensors() -> Contestant:
    from safetensors.torch import load_file, save_file

    def save(folder: Path, step: int, state: State) -> None:
        folder.mkdir(parents=True)
        save_file(state, folder / "state.safetensors")

    def load(folder: Path, like: State) -> State:
        return load_file(folder / "state.safetensors")

    return Contestant("safetensors", save, load)


def distributed_checkpoint() -> Contestant:
    import torch.distributed.checkpoint as dcp

    def save(folder: Path, step: int, state: State) -> None:
        dcp.save(state, checkpoint_id=folder, no_dist=True)

    def load(folder: Path, like: State) -> State:
        found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        return found

    return Contestant("torch.distributed.checkpoint", save, load)


def orbax() -> Contestant:
    """Return Orbax with its default files: zarr3 arrays, merged into an OCDBT database."""
    import numpy as np
    from orbax.checkpoint import PyTreeCheckpointer, args

    checkpointer = PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True)

    def save(folder: Path, step: int, state: State) -> None:
        tree = {name: tensor.numpy() for name, tensor in state.items()}
        checkpointer.save(folder, args=args.PyTreeSave(tree))

    def load(folder: Path, like: State) -> State:
        found: dict[str, Any] = checkpointer.restore(folder)
        return {name: torch.from_numpy(np.array(array)) for name, array in found.items()}

    return Contestant("Orbax (zarr3, OCDBT)", save, load)


def hlat() -> Contestant:
    """Return hlat with the two calls of a resumed run: verify, then load."""
    from hlat.checkpoint import checkpoint_store
    from hlat.distributed.state_shard import StateShard

    def shards(state: State) -> list[StateShard]:
        return [
            StateShard(name, shape := tuple(tensor.shape), (0,) * len(shape), shape, tensor)
            for name, tensor in state.items()
        ]

    def save(folder: Path, step: int, state: State) -> None:
        checkpoint_store.save_checkpoint(folder.parent, step, shards(state), {"step": step})

    def load(folder: Path, like: State) -> State:
        checkpoint_store.verify_checkpoint(folder)
        found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        checkpoint_store.load_checkpoint(folder, shards(found))
        return found

    return Contestant("hlat", save, load)


ALL: tuple[Callable[[], Contestant], ...] = (
    torch_save,
    safetensors,
    distributed_checkpoint,
    orbax,
    hlat,
)
