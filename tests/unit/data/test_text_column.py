"""Test the text column of files in every format, and errors without one."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data.text_column import read_text_batches


def read(path: Path, column: str = "text") -> list[str | None]:
    with pa.OSFile(str(path)) as file:
        return [
            text for array in read_text_batches(path, file, column) for text in array.to_pylist()
        ]


@pytest.mark.parametrize("file_format", ["file", "stream", "parquet"])
@pytest.mark.parametrize(
    "type_",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_text_of_every_format_and_type(
    tmp_path: Path, file_format: str, type_: pa.DataType, write_arrow
) -> None:
    path, texts = tmp_path / "a", ["one", None, "", "one", "✓"] * 4
    if file_format == "parquet":
        column = pa.array(texts).cast(type_) if type_ != pa.string_view() else pa.array(texts)
        pa.parquet.write_table(pa.table({"n": range(20), "text": column}), path, row_group_size=6)
    else:
        write_arrow(path, texts, type_=type_, stream=file_format == "stream", compression="zstd")
    assert read(path) == texts


@pytest.mark.parametrize("file_format", ["arrow", "parquet"])
def test_missing_column_is_an_error_that_lists_text_columns(
    tmp_path: Path, file_format: str, write_arrow
) -> None:
    path = write_arrow(tmp_path / "a", ["x"], column="content")
    if file_format == "parquet":
        pa.parquet.write_table(pa.table({"number": [1], "content": ["x"]}), path)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value) == (
        f"data.text_column=text: {path} has no column of this name; it has number (int64), "
        "content (string); set it, or text_column of this source alone, to one of: content"
    )


def test_a_column_of_another_type_is_an_error(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a", ["x"])
    with pytest.raises(ConfigError, match=r"is int64, not string or large_string; .* one of: text"):
        read(path, "number")


def test_duplicate_column_names_are_an_error(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    path = tmp_path / "a"
    with path.open("wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(ConfigError, match="has 2 columns of this name"):
        read(path)


def test_error_for_files_without_text_contains_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a"
    pa.parquet.write_table(pa.table({"n": [1]}), path)
    with pytest.raises(ConfigError, match="write the documents as a column of type string"):
        read(path)
