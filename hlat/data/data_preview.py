"""Text of the first sequences of a run, to check the column, the text and the mixture."""

from collections.abc import Iterator

import numpy as np

from hlat.config.batch import BatchConfig
from hlat.config.data import DataConfig
from hlat.config.phase import PhaseConfig
from hlat.data.batch_reader import BatchReader
from hlat.data.data_ledger import compute_totals
from hlat.data.packed_sequences import compute_document_ids
from hlat.data.training_data import open_training_data
from hlat.storage.progress_bar import print_line

LINE_WIDTH = 80


def print_preview(data: DataConfig, phase: PhaseConfig, batch: BatchConfig, seed: int) -> None:
    """Print the first `data.preview` sequences, each when it is read."""
    for text in render_preview(data, phase, batch, seed):
        print_line(text)


def render_preview(
    data: DataConfig, phase: PhaseConfig, batch: BatchConfig, seed: int
) -> Iterator[str]:
    """Yield the text of the first `data.preview` sequences in the order of the global batches.

    A line with the tokens of each source follows.

    Raises:
        ConfigError: If a file, column, weight or size is invalid.
    """
    training_data = open_training_data(data, phase, batch, seed)
    tokenizer = training_data.tokenizer
    num_rows = min(data.preview, batch.global_batch_size)
    reader = BatchReader(training_data, batch, range(num_rows))
    number = 0
    while number < data.preview:
        tokens, states = reader.read_batch()
        for row in tokens[: data.preview - number]:
            (ids,) = compute_document_ids(row[None], tokenizer.eos_token_id, tokenizer.bos_token_id)
            texts = [tokenizer.decode(row[ids == n].tolist()) for n in np.unique(ids)]
            number += 1
            yield _format_sequence(number, len(row), texts, data.eos_token)
    totals = compute_totals(states)[:, 1].tolist()
    counts = [f"{name} {count}" for name, count in zip(training_data.sources, totals, strict=True)]
    yield f"tokens of each source in the batches of these rows: {', '.join(counts)}"


def _format_sequence(number: int, num_tokens: int, documents: list[str], eos_token: str) -> str:
    """Format one sequence; its first and last document may be incomplete."""
    title = (
        f"== sequence {number}: {num_tokens} tokens, {len(documents)} documents or parts of them "
    )
    lines = [title.ljust(LINE_WIDTH, "=")]
    for text in documents:
        border = f"-- {eos_token} " if text.endswith(eos_token) else "-- goes on "
        lines += [text.removesuffix(eos_token), border.ljust(LINE_WIDTH, "-")]
    return "\n".join(lines)
