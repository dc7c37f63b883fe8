"""Compatibility of written files with the safetensors library."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hlat.checkpoint import safetensors_file
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_manifest import TensorRecord
from hlat.checkpoint.slice_record import SliceRecord
from hlat.distributed.tensor_slice import TensorSlice
from hlat.storage import durable_files


def test_the_library_reads_every_dtype_that_is_written(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
        for dtype in safetensors_file.SAFETENSORS_DTYPES
    }
    entries = {key: (tuple(value.shape), value) for key, value in tensors.items()}
    durable_files.write_file(tmp_path / "f", safetensors_file.serialize_tensors(entries))
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)


def test_the_bytes_do_not_depend_on_the_order_of_tensors(tmp_path: Path) -> None:
    entries = {"a": ((2,), torch.ones(2)), "b": ((), torch.tensor(1))}
    backwards = dict(reversed(entries.items()))
    one, other = (
        b"".join(safetensors_file.serialize_tensors(given)) for given in (entries, backwards)
    )
    assert one == other


def test_a_tensor_that_is_computed_while_it_is_written_gives_the_same_bytes() -> None:
    values = torch.arange(12, dtype=torch.bfloat16).reshape(6, 2)
    computed = safetensors_file.LazyTensor(torch.bfloat16, lambda: iter(values.split(4)))
    tensors = {"v": ((6, 2), values), "w": ((3,), torch.ones(3))}
    assert b"".join(
        safetensors_file.serialize_tensors(tensors | {"v": ((6, 2), computed)})
    ) == b"".join(safetensors_file.serialize_tensors(tensors))


def test_a_part_of_a_slice_is_read_relative_to_the_tensor(tmp_path: Path) -> None:
    values = torch.arange(12).reshape(6, 2)
    durable_files.write_file(
        tmp_path / "f", safetensors_file.serialize_tensors({"w@2,0": ((4, 2), values[2:])})
    )
    record = TensorRecord((6, 2), "I64", (SliceRecord((2, 0), (4, 2), "f"),))
    with safetensors_file.SafetensorsReader(tmp_path, {"w": record}) as reader:
        found = reader.read("w", TensorSlice((3, 1), (2, 1)))
        assert torch.equal(found, values[3:5, 1:])
        with pytest.raises(CorruptCheckpointError, match="contains 2 of the 4 elements of w"):
            reader.read("w", TensorSlice((1, 0), (2, 2)))


@pytest.mark.parametrize(
    "record",
    [
        TensorRecord((4,), "F32", (SliceRecord((0,), (4,), "missing"),)),
        TensorRecord((2,), "F32", (SliceRecord((0,), (2,), "f"),)),
        TensorRecord((4,), "I32", (SliceRecord((0,), (4,), "f"),)),
        TensorRecord((5,), "F32", (SliceRecord((0,), (4,), "f"), SliceRecord((4,), (1,), "f"))),
    ],
    ids=["file", "shape", "dtype", "key"],
)
def test_files_that_contradict_the_manifest_are_rejected(
    tmp_path: Path, record: TensorRecord
) -> None:
    durable_files.write_file(
        tmp_path / "f", safetensors_file.serialize_tensors({"w": ((4,), torch.zeros(4))})
    )
    with (
        safetensors_file.SafetensorsReader(tmp_path, {"w": record}) as reader,
        pytest.raises(CorruptCheckpointError),
    ):
        reader.read("w", TensorSlice((0,), record.shape))
