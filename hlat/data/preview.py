"""The first sequences of a run as text, with the borders of their documents.

A glance at what the model will read finds the wrong column, a doubled newline or a mixture gone
astray before a node is booked.
"""

import numpy as np

from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.phase import Phase
from hlat.data.corpora import open_corpora
from hlat.data.ledger import totals
from hlat.data.rows import Rows
from hlat.data.sequences import document_ordinals

WIDTH = 80


def preview(data: Data, phase: Phase, batch: Batch, seed: int) -> str:
    """Text of the first `data.preview` sequences, row by row of the first global batches.

    Raises:
        ConfigError: If a file, column, weight or size does not fit.
    """
    corpora = open_corpora(data, phase, batch, seed)
    rows = Rows(corpora, batch, range(min(data.preview, batch.global_batch_size)))
    shown: list[str] = []
    while len(shown) < data.preview:
        for row in rows.draw():
            documents = document_ordinals(row[None], corpora.tokenizer.eos)[0]
            parts = [row[documents == n].tolist() for n in np.unique(documents)]
            texts = [corpora.tokenizer.decode(part) for part in parts]
            shown.append(_show(len(shown) + 1, len(row), texts, data.eos_token))
    tokens = totals(rows.states())[:, 1].tolist()
    read = [f"{name} {count}" for name, count in zip(corpora.sources, tokens, strict=True)]
    told = f"tokens of each source in the batches of these rows: {', '.join(read)}"
    return "\n".join([*shown[: data.preview], told])


def _show(number: int, num_tokens: int, texts: list[str], eos_token: str) -> str:
    """One sequence. The first document may have begun before it, the last may go on after it."""
    title = f"== sequence {number}: {num_tokens} tokens, {len(texts)} documents or parts of them "
    border = f"-- {eos_token} "
    lines = [title.ljust(WIDTH, "=")]
    for text in texts:
        is_whole = text.endswith(eos_token)
        lines.append(text.removesuffix(eos_token))
        lines.append(border.ljust(WIDTH, "-") if is_whole else "-- goes on ".ljust(WIDTH, "-"))
    return "\n".join(lines)
