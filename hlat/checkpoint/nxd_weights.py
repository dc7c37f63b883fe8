"""Reader of canonical weights from checkpoints of neuronx-distributed (NxD).

Each rank file contains shards in the shape in which NxD computes. Replicated key/value heads are
read from all ranks and compared, because NxD does not enforce their equality.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hlat.checkpoint import nxd_directory, nxd_layout
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.nxd_layout import KVHeadOrder, NxdLayout, NxdParameterSlice
from hlat.checkpoint.nxd_rank_files import NxdRankFiles, NxdTensorInfo
from hlat.checkpoint.safetensors_file import DTYPES_BY_NAME
from hlat.checkpoint.tensor_slice import TensorSlice, build_full_slice
from hlat.config.config_errors import ConfigError
from hlat.config.model import InitCopies, ModelConfig
from hlat.model.parameter_specs import list_parameter_specs

_DTYPES = ("F32", "BF16", "F16")
_BUFFER_KEY = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Buffers that Llama models of transformers 4 save and can recompute."""
_MAX_COPY_DISTANCE = 0.5
"""Maximum relative distance of two heads that count as replicas; unrelated heads are 1.4 apart."""
_MAX_LISTED = 5
"""Number of problems that an error message lists."""

_TensorInfos = Mapping[str, Mapping[str, NxdTensorInfo]]
"""Tensors by file, then by name."""
_Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the canonical parameters by name."""


@dataclass(frozen=True)
class _SliceLocation:
    """Saved tensor that contains a slice of a canonical parameter."""

    file: str
    key: str
    parameter_slice: NxdParameterSlice

    def read(self, files: NxdRankFiles, tensor_slice: TensorSlice) -> torch.Tensor:
        """Return a subset of the slice."""
        tensor = files.load_tensor(self.file, self.key)
        saved = TensorSlice(self.parameter_slice.offset, self.parameter_slice.tensor_slice.size)
        parameter = tensor[saved.index_in(build_full_slice(tuple(tensor.shape)))]
        return parameter[tensor_slice.index_in(self.parameter_slice.tensor_slice)]


class NxdWeightReader:
    """Reader of slices of the canonical weights.

    Args:
        path: Value of model.init_from.
        model: Shape of the model.

    Raises:
        ConfigError: If the directory does not contain exactly the weights of the model.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        directory = nxd_directory.find_model_dir(path)
        stages = nxd_directory.list_rank_files(directory)
        self._files = NxdRankFiles(directory, max_mapped=len(stages[0]))
        self._compare_copies = model.init_copies is InitCopies.equal
        infos = {
            file: {
                key: info
                for key, info in self._files.load_tensor_infos(file).items()
                if not _BUFFER_KEY.fullmatch(key)
            }
            for stage in stages
            for file in stage
        }
        shapes = {parameter.name: parameter.shape for parameter in list_parameter_specs(model)}
        tied_names = {"lm_head.weight"} if model.tie_embeddings else set()
        _raise_if_any(_find_name_mismatches(stages, infos, {*shapes, *tied_names}))
        layout, (stage, key) = _infer_layout(model, stages, infos)
        _raise_if_any(_find_shape_mismatches(model, layout, stages, infos, shapes))
        if layout.is_order_significant:
            layout = _infer_head_order(model, layout, stage, key, shapes, self._files)
        self._locations = _locate_slices(model, layout, stages, infos, shapes)
        self._dtypes = {
            name: infos[location.file][location.key].dtype
            for name, slices in self._locations.items()
            for (location, *_) in slices.values()
        }

    def get_dtype(self, name: str) -> str:
        """Return the safetensors dtype of a saved parameter."""
        return self._dtypes[name]

    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """Return a slice of a canonical parameter as a new tensor in the saved dtype.

        Raises:
            CorruptCheckpointError: If replicas differ.
        """
        tensor = torch.empty(tensor_slice.size, dtype=DTYPES_BY_NAME[self._dtypes[name]])
        for saved_slice, (first, *copies) in self._locations[name].items():
            overlap = tensor_slice.intersect(saved_slice)
            if overlap is None:
                continue
            part = first.read(self._files, overlap)
            for copy in copies if self._compare_copies else ():
                other = copy.read(self._files, overlap)
                _validate_copies_equal(name, (first.file, copy.file), (part, other))
            tensor[overlap.index_in(tensor_slice)] = part
        return tensor


def _find_name_mismatches(
    stages: list[list[str]], infos: _TensorInfos, known_names: set[str]
) -> list[str]:
    """Return the tensors that are not part of the model, or missing on some ranks of a stage."""
    problems, files = [], dict[str, str]()
    for first, *others in stages:
        for key in infos[first]:
            names = nxd_layout.list_canonical_names(key)
            if not known_names.issuperset(names):
                problems.append(f"{first} has {key}, which this model lacks{_format_hint(key)}")
            problems += [f"{files[n]} and {first} both contain {n}" for n in names if n in files]
            files |= dict.fromkeys(names, first)
        for other in others:
            for one, two in ((first, other), (other, first)):
                missing = [key for key in infos[one] if key not in infos[two]]
                problems += [f"{two} lacks {key}, which {one} has" for key in missing]
    return problems


def _format_hint(key: str) -> str:
    if not key.startswith("language_model."):
        return ""
    return "; it is a Megatron model of NxDT, which its checkpoint_converter.py writes as a Llama"


def _infer_layout(
    model: ModelConfig, stages: list[list[str]], infos: _TensorInfos
) -> tuple[NxdLayout, tuple[list[str], str]]:
    """Return the layout without the head order, and stage and name of a tensor with keys.

    The number of files determines the ranks, the shape of the keys the number of replicas.
    """
    candidates = (
        (stage, key)
        for stage in stages
        for key in infos[stage[0]]
        if any(".k_proj." in name for name in nxd_layout.list_canonical_names(key))
    )
    stage, key = next(candidates, ([], ""))
    if not stage:
        raise ConfigError(f"{stages[0][0]} has no keys of any layer")
    tp, shape = len(stage), infos[stage[0]][key].shape
    replicas = nxd_layout.infer_kv_size_multiplier(model, tp, key, shape[0] if shape else 0)
    if replicas is None:
        raise ConfigError(
            f"{stage[0]} has {key} of shape {list(shape)}, which is not a shard for {tp} ranks "
            f"of model.num_attention_heads={model.num_attention_heads} and copies of "
            f"model.num_key_value_heads={model.num_key_value_heads}, heads of {model.head_dim}"
        )
    layout = NxdLayout(tp, replicas)
    _raise_if_any(nxd_layout.find_layout_problems(model, layout))
    return layout, (stage, key)


def _find_shape_mismatches(
    model: ModelConfig,
    layout: NxdLayout,
    stages: list[list[str]],
    infos: _TensorInfos,
    shapes: _Shapes,
) -> list[str]:
    """Return the tensors of another shape or dtype, and the missing parameters."""
    problems, seen = [], set[str]()
    for stage in stages:
        for rank, file in enumerate(stage):
            for key, info in _skip_tied_head(infos[file], shapes):
                seen.update(nxd_layout.list_canonical_names(key))
                shape = nxd_layout.compute_tensor_shape(
                    nxd_layout.list_parameter_slices(model, layout, rank, key, shapes)
                )
                first_dtype = infos[stage[0]][key].dtype
                if info.shape != shape:
                    problems.append(
                        f"{file} has {key} of shape {list(info.shape)}, this run's model sharded "
                        f"over {layout.tp} ranks {list(shape)}"
                    )
                elif info.dtype not in _DTYPES:
                    problems.append(
                        f"{file} has {key} in {info.dtype}; hlat reads {', '.join(_DTYPES)}"
                    )
                elif info.dtype != first_dtype:
                    problems.append(f"{file} has {key} in {info.dtype}, {stage[0]} {first_dtype}")
    return problems + [f"it lacks {name}" for name in shapes if name not in seen]


def _skip_tied_head(
    infos: Mapping[str, NxdTensorInfo], shapes: _Shapes
) -> Iterator[tuple[str, NxdTensorInfo]]:
    for key, info in infos.items():
        if all(name in shapes for name in nxd_layout.list_canonical_names(key)):
            yield key, info


def _infer_head_order(
    model: ModelConfig,
    layout: NxdLayout,
    stage: list[str],
    key: str,
    shapes: _Shapes,
    files: NxdRankFiles,
) -> NxdLayout:
    """Return the layout with the head order in which the first rows of replicas are close."""
    rows = [
        [
            files.load_tensor(file, key)[parameter_slice.offset[0]].double()
            for parameter_slice in nxd_layout.list_parameter_slices(
                model, layout, rank, key, shapes
            )
            if ".k_proj." in parameter_slice.name
        ]
        for rank, file in enumerate(stage)
    ]
    layouts = [replace(layout, head_order=order) for order in KVHeadOrder]
    distances = [_compute_max_copy_distance(model, one, rows) for one in layouts]
    close = [one for one, far in zip(layouts, distances, strict=True) if far <= _MAX_COPY_DISTANCE]
    if len(close) == 1:
        return close[0]
    raise CorruptCheckpointError(
        f"{key} contains {layout.kv_size_multiplier} copies of each key/value head in an unknown "
        f"order: their maximum relative distance is {distances[0]:.2g} in the order of trn1 and "
        f"{distances[1]:.2g} in the order of trn2. In a run on trn2 whose heads NxD itself "
        "initialised there are no copies"
    )


def _compute_max_copy_distance(
    model: ModelConfig, layout: NxdLayout, rows: list[list[torch.Tensor]]
) -> float:
    """Return the maximum distance of a head from its first replica, relative to its norm."""
    firsts: dict[int, torch.Tensor] = {}
    max_distance = 0.0
    for rank, head_rows in enumerate(rows):
        heads, _ = layout.compute_kv_heads(model, rank)
        for head, row in zip(heads, head_rows, strict=True):
            first = firsts.setdefault(head, row)
            max_distance = max(max_distance, float((row - first).norm() / first.norm()))
    return max_distance


def _locate_slices(
    model: ModelConfig,
    layout: NxdLayout,
    stages: list[list[str]],
    infos: _TensorInfos,
    shapes: _Shapes,
) -> dict[str, dict[TensorSlice, list[_SliceLocation]]]:
    """Return the locations of every slice of every parameter, one for each replica."""
    locations: dict[str, dict[TensorSlice, list[_SliceLocation]]] = {
        name: defaultdict(list) for name in shapes
    }
    for stage in stages:
        for rank, file in enumerate(stage):
            for key, _ in _skip_tied_head(infos[file], shapes):
                for one in nxd_layout.list_parameter_slices(model, layout, rank, key, shapes):
                    location = _SliceLocation(file, key, one)
                    locations[one.name][one.tensor_slice].append(location)
    return locations


def _validate_copies_equal(
    name: str, files: tuple[str, str], copies: tuple[torch.Tensor, torch.Tensor]
) -> None:
    if not torch.equal(*copies):
        difference = float((copies[0].double() - copies[1].double()).abs().max())
        raise CorruptCheckpointError(
            f"{files[0]} and {files[1]} should contain copies of {name}, and differ by up to "
            f"{difference:.3g}; copies drift under stochastic rounding, as in HLAT's 7B run: if "
            "this is the reason, model.init_copies=first takes the first of each"
        )


def _raise_if_any(problems: list[str]) -> None:
    num_more = len(problems) - _MAX_LISTED
    if problems:
        rest = [f"and {num_more} more of the kind"] if num_more > 0 else []
        raise ConfigError(*problems[:_MAX_LISTED], *rest)
