"""The check of the batches passes with equal documents and with separate held-out documents."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pytest

from hlat.config.resolve import resolve_config
from hlat.distributed.parallel_state import ParallelState
from hlat.doctor.check_result import CheckStatus
from hlat.doctor.data_order_check import check_data
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.reduced_config import reduce_config

TEXTS = ["The same license in each file."] * 60
HELDOUT = [f"held out {n}" for n in range(90)]


@pytest.mark.parametrize("is_separate", [False, True], ids=["reserved", "separate"])
def test_batches_of_equal_documents_pass(compose, tmp_path: Path, is_separate: bool) -> None:
    texts = {"corpus": TEXTS, "heldout": HELDOUT}
    paths = {key: _write_arrow(tmp_path / f"{key}.arrow", value) for key, value in texts.items()}
    overrides = ["data=files", f"data.sources.files.paths=[{paths['corpus']}]", "data.workers=0"]
    overrides.append(
        f"data.sources.files.heldout_paths=[{paths['heldout']}]"
        if is_separate
        else "data.heldout_documents=1"
    )
    config = reduce_config(resolve_config(compose(*overrides)))
    parallel_state = ParallelState(rank=0, dp_rank=0, dp_size=1)
    harness = SimpleNamespace(
        config=config,
        engine=SimpleNamespace(parallel_state=parallel_state),
        is_rank0=True,
        broadcast_object=lambda value: value,
    )
    (result,) = check_data(cast(EngineHarness, harness))
    assert result.status is CheckStatus.passed, result.message


def _write_arrow(path: Path, texts: list[str]) -> Path:
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path
