"""Reader of canonical weights from checkpoints of neuronx-distributed (NxD).

Each rank file contains shards in the shape in which NxD computes. Replicated key/value heads are
read from all ranks and compared, because NxD does not enforce their equality.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hlat.checkpoint import nxd_directory, nxd_layout
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError, raise_problems
from hlat.checkpoint.nxd_layout import KVHeadOrder, NxdLayout, NxdParameterSlice
from hlat.checkpoint.nxd_rank_files import NxdRankFiles, NxdTensorInfo
from hlat.checkpoint.safetensors_file import DTYPES_BY_NAME
from hlat.config.config_errors import ConfigError
from hlat.config.model import InitCopies, ModelConfig
from hlat.distributed.tensor_slice import TensorSlice, build_full_slice
from hlat.model.decoder_spec import list_parameter_specs

_DTYPES = ("F32", "BF16", "F16")
_BUFFER_KEY = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Buffers that Llama models of transformers 4 save and can recompute."""
_MAX_COPY_DISTANCE = 0.5
"""Maximum relative distance of two heads that count as replicas; unrelated heads are 1.4 apart."""

_MEGATRON_HINT = (
    "; it is a Megatron model of NxDT, which its checkpoint_converter.py writes as a Llama"
)


@dataclass(frozen=True)
class _SliceLocation:
    """Saved tensor that contains a slice of a canonical parameter."""

    file: str
    key: str
    info: NxdTensorInfo
    parameter_slice: NxdParameterSlice

    def read(self, files: NxdRankFiles, tensor_slice: TensorSlice) -> torch.Tensor:
        """Return a subset of the slice."""
        tensor = files.load_tensor(self.file, self.key, self.info)
        saved = TensorSlice(self.parameter_slice.offset, self.parameter_slice.tensor_slice.size)
        parameter = tensor[saved.index_in(build_full_slice(tuple(tensor.shape)))]
        return parameter[tensor_slice.index_in(self.parameter_slice.tensor_slice)]


class NxdWeightReader:
    """Reader of slices of the canonical weights in the directory of model.init_from.

    Raises:
        ConfigError: If the directory does not contain exactly the weights of the model.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        directory = nxd_directory.find_model_dir(path)
        self._model, self._stages = model, nxd_directory.list_rank_files(directory)
        self._shapes = {
            parameter.name: parameter.shape for parameter in list_parameter_specs(model)
        }
        self._files = NxdRankFiles(directory, max_mapped=len(self._stages[0]))
        self._infos = {
            file: {
                key: info
                for key, info in self._files.load_tensor_infos(file).items()
                if not _BUFFER_KEY.fullmatch(key)
            }
            for stage in self._stages
            for file in stage
        }
        raise_problems(self._find_name_mismatches())
        stage, key = self._find_key_tensor()
        layout = self._infer_layout(stage, key)
        raise_problems(self._find_shape_mismatches(layout))
        if layout.is_order_significant:
            layout = self._infer_head_order(layout, stage, key)
        self._locations: dict[str, dict[TensorSlice, list[_SliceLocation]]] = {
            name: defaultdict(list) for name in self._shapes
        }
        for _, file, key, info, slices in self._iter_tensors(layout):
            for one in slices:
                location = _SliceLocation(file, key, info, one)
                self._locations[one.name][one.tensor_slice].append(location)

    def get_dtype(self, name: str) -> str:
        """Return the safetensors dtype of a saved parameter."""
        return next(iter(self._locations[name].values()))[0].info.dtype

    def has_tensor(self, name: str) -> bool:
        """Return True if the files contain a canonical parameter; tied heads do not count."""
        return name in self._locations

    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """Return a slice of a canonical parameter as a new tensor in the saved dtype.

        Raises:
            CorruptCheckpointError: If replicas differ.
        """
        tensor = torch.empty(tensor_slice.size, dtype=DTYPES_BY_NAME[self.get_dtype(name)])
        compare_copies = self._model.init_copies is InitCopies.equal
        for saved_slice, (first, *copies) in self._locations[name].items():
            overlap = tensor_slice.intersect(saved_slice)
            if overlap is None:
                continue
            part = first.read(self._files, overlap)
            for copy in copies if compare_copies else ():
                other = copy.read(self._files, overlap)
                if not torch.equal(part, other):
                    difference = float((part.double() - other.double()).abs().max())
                    raise CorruptCheckpointError(
                        f"{first.file} and {copy.file} should contain copies of {name}, and differ "
                        f"by up to {difference:.3g}; copies drift under stochastic rounding, as in "
                        "HLAT's 7B run: if this is the reason, model.init_copies=first takes the "
                        "first of each"
                    )
            tensor[overlap.index_in(tensor_slice)] = part
        return tensor

    def _find_name_mismatches(self) -> list[str]:
        """Return the tensors that are not part of the model, or missing on ranks of a stage."""
        problems, files, infos = [], dict[str, str](), self._infos
        known_names = {*self._shapes, *(["lm_head.weight"] if self._model.tie_embeddings else [])}
        for first, *others in self._stages:
            for key in infos[first]:
                names = nxd_layout.list_canonical_names(key)
                if not known_names.issuperset(names):
                    hint = _MEGATRON_HINT if key.startswith("language_model.") else ""
                    problems.append(f"{first} has {key}, which this model lacks{hint}")
                problems += [
                    f"{files[n]} and {first} both contain {n}" for n in names if n in files
                ]
                files |= dict.fromkeys(names, first)
            for other in others:
                for one, two in ((first, other), (other, first)):
                    missing = [key for key in infos[one] if key not in infos[two]]
                    problems += [f"{two} lacks {key}, which {one} has" for key in missing]
        return problems

    def _find_key_tensor(self) -> tuple[list[str], str]:
        """Return the files of a pipeline stage and the name of a tensor with keys in them."""
        for stage in self._stages:
            for key in self._infos[stage[0]]:
                if any(".k_proj." in name for name in nxd_layout.list_canonical_names(key)):
                    return stage, key
        raise ConfigError(f"{self._stages[0][0]} has no keys of any layer")

    def _infer_layout(self, stage: list[str], key: str) -> NxdLayout:
        """Return the layout without the head order.

        The number of files determines the ranks, the shape of the keys the number of replicas.
        """
        tp, shape, model = len(stage), self._infos[stage[0]][key].shape, self._model
        replicas = nxd_layout.infer_kv_size_multiplier(model, tp, key, (*shape, 0)[0])
        if replicas is None:
            raise ConfigError(
                f"{stage[0]} has {key} of shape {list(shape)}, which is not a shard for "
                f"{tp} ranks of model.num_attention_heads={model.num_attention_heads} and copies "
                f"of model.num_key_value_heads={model.num_key_value_heads}, heads of "
                f"{model.head_dim}"
            )
        layout = NxdLayout(tp, replicas)
        raise_problems(nxd_layout.find_layout_problems(model, layout))
        return layout

    def _find_shape_mismatches(self, layout: NxdLayout) -> list[str]:
        """Return the tensors of another shape or dtype, and the missing parameters."""
        problems, seen = [], set[str]()
        for first, file, key, info, slices in self._iter_tensors(layout):
            seen.update(nxd_layout.list_canonical_names(key))
            shape = nxd_layout.compute_tensor_shape(slices)
            first_dtype = self._infos[first][key].dtype
            if info.shape != shape:
                problems.append(
                    f"{file} has {key} of shape {list(info.shape)}, this run's model sharded over "
                    f"{layout.tp} ranks {list(shape)}"
                )
            elif info.dtype not in _DTYPES:
                problems.append(
                    f"{file} has {key} in {info.dtype}; hlat reads {', '.join(_DTYPES)}"
                )
            elif info.dtype != first_dtype:
                problems.append(f"{file} has {key} in {info.dtype}, {first} {first_dtype}")
        return problems + [f"it lacks {name}" for name in self._shapes if name not in seen]

    def _infer_head_order(self, layout: NxdLayout, stage: list[str], key: str) -> NxdLayout:
        """Return the layout with the head order in which the first rows of replicas are close."""
        rows = [
            [
                self._files.load_tensor(file, key, self._infos[file][key])[one.offset[0]].double()
                for one in self._list_slices(layout, rank, key)
                if ".k_proj." in one.name
            ]
            for rank, file in enumerate(stage)
        ]
        layouts = [replace(layout, head_order=order) for order in KVHeadOrder]
        distances = [_compute_max_copy_distance(self._model, one, rows) for one in layouts]
        pairs = zip(layouts, distances, strict=True)
        close = [one for one, distance in pairs if distance <= _MAX_COPY_DISTANCE]
        if len(close) == 1:
            return close[0]
        raise CorruptCheckpointError(
            f"{key} contains {layout.kv_size_multiplier} copies of each key/value head in an "
            f"unknown order: their maximum relative distance is {distances[0]:.2g} in the order of "
            f"trn1 and {distances[1]:.2g} in the order of trn2. In a run on trn2 whose heads NxD "
            "itself initialised there are no copies"
        )

    def _iter_tensors(
        self, layout: NxdLayout
    ) -> Iterator[tuple[str, str, str, NxdTensorInfo, tuple[NxdParameterSlice, ...]]]:
        """Yield first file of the stage, file, key, info and slices of tensors but tied heads."""
        for stage in self._stages:
            for rank, file in enumerate(stage):
                for key, info in self._infos[file].items():
                    if self._shapes.keys() >= {*nxd_layout.list_canonical_names(key)}:
                        yield stage[0], file, key, info, self._list_slices(layout, rank, key)

    def _list_slices(self, layout: NxdLayout, rank: int, key: str) -> tuple[NxdParameterSlice, ...]:
        return nxd_layout.list_parameter_slices(self._model, layout, rank, key, self._shapes)


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
