"""The first sequences of a run as text, with the borders of their documents.

A glance at what the model will read finds the wrong column, a doubled newline or a mixture gone
astray before a node is booked.
"""

from dataclasses import replace

import numpy as np

from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.phase import Phase
from hlat.data.loader import open_loader
from hlat.data.sequences import document_ordinals

WIDTH = 80


def preview(data: Data, phase: Phase, batch: Batch, seed: int) -> str:
    """Text of the first `data.preview` sequences, row by row of the first global batches.

    Raises:
        ConfigError: If a file, column, weight or size does not fit.
    """
    loader = open_loader(replace(data, workers=0, prefetch=0), phase, batch, seed)
    shown: list[str] = []
    try:
        while len(shown) < data.preview:
            for row in loader.next().tokens[: data.preview - len(shown)]:
                documents = document_ordinals(row[None], loader.eos)[0]
                texts = [loader.decode(row[documents == n]) for n in np.unique(documents)]
                shown.append(_show(len(shown) + 1, len(row), texts, data.eos_token))
    finally:
        loader.close()
    read = [f"{name} {entry['tokens']}" for name, entry in loader.ledger().items()]
    return "\n".join([*shown, f"tokens read from each source: {', '.join(read)}"])


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
