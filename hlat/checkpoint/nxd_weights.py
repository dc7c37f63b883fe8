"""The canonical weights in a folder that neuronx-distributed (NxD) saved, read box by box.

Each rank's file holds its share in the shape in which NxD computes with it. Where ranks hold copies
all of them are read and compared, because nothing in NxD keeps them equal.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hlat.checkpoint import nxd_folder, nxd_layout
from hlat.checkpoint.box import Box
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.nxd_files import Entry, Files
from hlat.checkpoint.nxd_layout import HeadOrder, Layout, Part
from hlat.checkpoint.tensor_file import TORCH_DTYPES
from hlat.config.errors import ConfigError
from hlat.config.model import InitCopies, Model
from hlat.model.canonical import parameters

_DTYPES = ("F32", "BF16", "F16")
_BUFFER = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""What Llamas of transformers 4 save beside their weights, and can recompute."""
_NEAR = 0.5
"""Farthest distance, in its own length, at which one head passes for a copy of another; two that
have nothing to do with each other are 1.4 apart."""
_MOST_NAMED = 5
"""Problems that are told before the rest is counted."""

_Entries = Mapping[str, Mapping[str, Entry]]
"""Tensors by file, then by name."""
_Shapes = Mapping[str, tuple[int, ...]]
"""Of the canonical parameters, by name."""


@dataclass(frozen=True)
class _Place:
    """Where a box of a canonical parameter lies."""

    file: str
    key: str
    part: Part

    def of(self, files: Files, box: Box) -> torch.Tensor:
        """A box within the part."""
        tensor = files.tensor(self.file, self.key)
        whole = Box((0,) * len(self.part.offset), tuple(tensor.shape))
        part = tensor[Box(self.part.offset, self.part.box.size).within(whole)]
        return part[box.within(self.part.box)]


class NxdWeights:
    """Reads boxes of the canonical weights.

    Args:
        path: What model.init_from names.
        model: Shape of the model.

    Raises:
        ConfigError: The folder does not hold exactly the weights of the model.
    """

    def __init__(self, path: Path, model: Model) -> None:
        folder = nxd_folder.chosen(path)
        stages = nxd_folder.ranks(folder)
        self._files = Files(folder, mapped=len(stages[0]))
        self._compared = model.init_copies is InitCopies.equal
        entries = {file: _weights(self._files.entries(file)) for stage in stages for file in stage}
        shapes = {parameter.name: parameter.shape for parameter in parameters(model)}
        tied = {"lm_head.weight"} if model.tie_embeddings else set()
        _refuse(_misnamed(stages, entries, {*shapes, *tied}))
        layout, (stage, key) = _layout(model, stages, entries)
        _refuse(_misshapen(model, layout, stages, entries, shapes))
        if layout.ordered:
            layout = _with_order(model, layout, stage, key, shapes, self._files)
        self._places = _places(model, layout, stages, entries, shapes)
        self._dtypes = {
            name: entries[place.file][place.key].dtype
            for name, boxes in self._places.items()
            for (place, *_) in boxes.values()
        }

    def dtype(self, name: str) -> str:
        """The dtype in which a parameter was saved, as safetensors names it."""
        return self._dtypes[name]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Assemble a part of a canonical parameter.

        Args:
            name: Canonical name.
            box: The part that is wanted.

        Returns:
            A new tensor of shape `box.size` and the dtype that was saved.

        Raises:
            CorruptCheckpointError: Ranks that should hold copies do not.
        """
        values = torch.empty(box.size, dtype=TORCH_DTYPES[self._dtypes[name]])
        for piece, (first, *copies) in self._places[name].items():
            overlap = box.overlap(piece)
            if overlap is None:
                continue
            found = first.of(self._files, overlap)
            for copy in copies if self._compared else ():
                _compare(name, first, found, copy, copy.of(self._files, overlap))
            values[overlap.within(box)] = found
        return values


def _weights(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    return {key: entry for key, entry in entries.items() if not _BUFFER.fullmatch(key)}


def _misnamed(stages: list[list[str]], entries: _Entries, known: set[str]) -> list[str]:
    """Tensors that are none of the model's, or that not all ranks of one stage have."""
    found, seen = [], dict[str, str]()
    for first, *others in stages:
        for key in entries[first]:
            names = nxd_layout.held(key)
            if not known.issuperset(names):
                found.append(f"{first} has {key}, which this model has not{_hint(key)}")
            found += [f"{seen[n]} and {first} both hold {n}" for n in names if n in seen]
            seen |= dict.fromkeys(names, first)
        for other in others:
            for one, two in ((first, other), (other, first)):
                lost = [key for key in entries[one] if key not in entries[two]]
                found += [f"{two} lacks {key}, which {one} has" for key in lost]
    return found


def _hint(key: str) -> str:
    if not key.startswith("language_model."):
        return ""
    return "; it is a Megatron model of NxDT, which its checkpoint_converter.py writes as a Llama"


def _layout(
    model: Model, stages: list[list[str]], entries: _Entries
) -> tuple[Layout, tuple[list[str], str]]:
    """How the model was cut, but for the order of copies; and which tensors hold a layer's keys.

    Files tell the number of ranks, shapes the number of copies.
    """
    found = (
        (stage, key)
        for stage in stages
        for key in entries[stage[0]]
        if any(".k_proj." in name for name in nxd_layout.held(key))
    )
    stage, key = next(found, ([], ""))
    if not stage:
        raise ConfigError(f"{stages[0][0]} has no keys of any layer")
    tp, shape = len(stage), entries[stage[0]][key].shape
    copies = nxd_layout.copies_of_heads(model, tp, key, shape[0] if shape else 0)
    if copies is None:
        raise ConfigError(
            f"{stage[0]} has {key} of shape {list(shape)}, which is no share for one of {tp} ranks "
            f"of model.num_attention_heads={model.num_attention_heads} and copies of "
            f"model.num_key_value_heads={model.num_key_value_heads}, heads of {model.head_dim}"
        )
    layout = Layout(tp, copies)
    _refuse(nxd_layout.problems(model, layout))
    return layout, (stage, key)


def _misshapen(
    model: Model, layout: Layout, stages: list[list[str]], entries: _Entries, shapes: _Shapes
) -> list[str]:
    """Tensors of another shape or dtype, and parameters that are in none."""
    found, seen = [], set[str]()
    for leader, rank, file in _ranked(stages):
        for key, entry in _of_model(entries[file], shapes):
            seen.update(nxd_layout.held(key))
            wanted = nxd_layout.extent(nxd_layout.parts(model, layout, rank, key, shapes))
            first = entries[leader][key]
            if entry.shape != wanted:
                found.append(
                    f"{file} has {key} of shape {list(entry.shape)}, this run's model cut for "
                    f"{layout.tp} ranks {list(wanted)}"
                )
            elif entry.dtype not in _DTYPES:
                found.append(f"{file} has {key} in {entry.dtype}; hlat reads {', '.join(_DTYPES)}")
            elif entry.dtype != first.dtype:
                found.append(f"{file} has {key} in {entry.dtype}, {leader} in {first.dtype}")
    return found + [f"it lacks {name}" for name in shapes if name not in seen]


def _ranked(stages: list[list[str]]) -> Iterator[tuple[str, int, str]]:
    """For each file: the first of its stage, its tensor-parallel rank, itself."""
    for stage in stages:
        for rank, file in enumerate(stage):
            yield stage[0], rank, file


def _of_model(entries: Mapping[str, Entry], shapes: _Shapes) -> Iterator[tuple[str, Entry]]:
    """All but the head of a model whose embedding is its head."""
    for key, entry in entries.items():
        if all(name in shapes for name in nxd_layout.held(key)):
            yield key, entry


def _with_order(
    model: Model, layout: Layout, stage: list[str], key: str, shapes: _Shapes, files: Files
) -> Layout:
    """The layout with the order in which copies are near each other, by a row of each head."""
    rows = [
        [
            files.tensor(file, key)[part.offset[0]].double()
            for part in nxd_layout.parts(model, layout, rank, key, shapes)
            if ".k_proj." in part.name
        ]
        for rank, file in enumerate(stage)
    ]
    orders = [replace(layout, order=order) for order in HeadOrder]
    distances = [_distance(model, order, rows) for order in orders]
    near = [order for order, far in zip(orders, distances, strict=True) if far <= _NEAR]
    if len(near) == 1:
        return near[0]
    trn1, trn2 = distances
    raise CorruptCheckpointError(
        f"{key} holds {layout.copies} copies of each key/value head, and it is unclear which: the "
        f"farthest would be {trn1:.2g} of their length apart if they lay as on trn1, {trn2:.2g} if "
        "as on trn2. In a run on trn2 whose heads NxD itself initialised there are no copies"
    )


def _distance(model: Model, layout: Layout, rows: list[list[torch.Tensor]]) -> float:
    """Of the farthest copy of a head from its first, in the length of that."""
    firsts: dict[int, torch.Tensor] = {}
    farthest = 0.0
    for rank, own in enumerate(rows):
        heads, _ = layout.heads(model, rank)
        for head, row in zip(heads, own, strict=True):
            first = firsts.setdefault(head, row)
            farthest = max(farthest, float((row - first).norm() / first.norm()))
    return farthest


def _places(
    model: Model, layout: Layout, stages: list[list[str]], entries: _Entries, shapes: _Shapes
) -> dict[str, dict[Box, list[_Place]]]:
    """Where every box of every parameter lies, once for each copy."""
    found: dict[str, dict[Box, list[_Place]]] = {name: defaultdict(list) for name in shapes}
    for _, rank, file in _ranked(stages):
        for key, _ in _of_model(entries[file], shapes):
            for part in nxd_layout.parts(model, layout, rank, key, shapes):
                found[part.name][part.box].append(_Place(file, key, part))
    return found


def _compare(
    name: str, first: _Place, found: torch.Tensor, copy: _Place, other: torch.Tensor
) -> None:
    """Return if two copies are equal."""
    if torch.equal(found, other):
        return
    apart = float((found.double() - other.double()).abs().max())
    raise CorruptCheckpointError(
        f"{first.file} and {copy.file} should hold copies of {name}, and differ by up to "
        f"{apart:.3g}; copies drift where rounding is stochastic, as in HLAT's 7B run: if that "
        "may be so, model.init_copies=first takes the first of each"
    )


def _refuse(problems: list[str]) -> None:
    more = len(problems) - _MOST_NAMED
    if problems:
        rest = [f"and {more} more of the kind"] if more > 0 else []
        raise ConfigError(*problems[:_MOST_NAMED], *rest)
