"""The canonical weights in a folder that neuronx-distributed (NxD) saved, read box by box.

Each rank's file holds its share in the shape in which NxD computes with it. Where ranks hold copies
all of them are read and compared, because nothing in NxD keeps them equal.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
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
        layout = _layout(model, stages, entries, shapes, self._files)
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
    model: Model, stages: list[list[str]], entries: _Entries, shapes: _Shapes, files: Files
) -> Layout:
    """How the model was cut.

    Files tell the number of ranks, shapes the number of copies of heads, values their order.
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
    copies = nxd_layout.copies_of_heads(model, tp, key, shape[0])
    if copies is None:
        raise ConfigError(
            f"{stage[0]} has {key} of shape {list(shape)}, which is no share for one of {tp} ranks "
            f"of model.num_attention_heads={model.num_attention_heads} and copies of "
            f"model.num_key_value_heads={model.num_key_value_heads}, heads of {model.head_dim}"
        )
    layout = Layout(tp, copies)
    _refuse(nxd_layout.problems(model, layout))
    if not layout.ordered:
        return layout
    rows = [
        [
            files.tensor(file, key)[part.offset[0]].double()
            for part in nxd_layout.parts(model, layout, rank, key, shapes)
            if ".k_proj." in part.name
        ]
        for rank, file in enumerate(stage)
    ]
    return replace(layout, order=_order(model, layout, key, rows))


def _order(model: Model, layout: Layout, key: str, rows: list[list[torch.Tensor]]) -> HeadOrder:
    """The order in which copies are near each other, by one row of keys per rank and head."""
    distances = {order: _distance(model, replace(layout, order=order), rows) for order in HeadOrder}
    near = [order for order in HeadOrder if distances[order] <= _NEAR]
    if len(near) == 1:
        return near[0]
    told = ", ".join(f"{order.value} {distance:.2g}" for order, distance in distances.items())
    raise CorruptCheckpointError(
        f"{key} holds {layout.copies} copies of each key/value head in neither order of NxD's; the "
        f"farthest would be this far apart, in their own length: {told}. A run on trn2 whose heads "
        "NxD itself initialised never had copies"
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
    model: Model,
    layout: Layout,
    stages: list[list[str]],
    entries: _Entries,
    shapes: _Shapes,
) -> dict[str, dict[Box, list[_Place]]]:
    """Where every box of every parameter lies, once for each copy."""
    found: dict[str, dict[Box, list[_Place]]] = {name: defaultdict(list) for name in shapes}
    problems = []
    ranked = [(stage[0], rank, file) for stage in stages for rank, file in enumerate(stage)]
    for leader, rank, file in ranked:
        for key, entry in entries[file].items():
            first = entries[leader][key]
            if key not in shapes and nxd_layout.held(key) == (key,):
                continue  # the head of a model whose embedding is its head
            parts = nxd_layout.parts(model, layout, rank, key, shapes)
            wanted = nxd_layout.extent(parts)
            if entry.shape != wanted:
                problems.append(
                    f"{file} has {key} of shape {list(entry.shape)}, this run's model cut for "
                    f"{layout.tp} ranks {list(wanted)}"
                )
            elif entry.dtype not in _DTYPES:
                problems.append(
                    f"{file} has {key} in {entry.dtype}; hlat reads {', '.join(_DTYPES)}"
                )
            elif entry.dtype != first.dtype:
                problems.append(f"{file} has {key} in {entry.dtype}, {leader} in {first.dtype}")
            for part in parts:
                found[part.name][part.box].append(_Place(file, key, part))
    _refuse([*problems, *(f"it lacks {name}" for name, boxes in found.items() if not boxes)])
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
