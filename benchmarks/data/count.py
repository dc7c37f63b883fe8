"""Count lost and repeated documents of the `numbered` corpus in the batches of a loader."""

import re
from pathlib import Path

import numpy as np
import tokenizers
from contestants import BOS, EOS
from numpy.typing import NDArray

NUM_NUMBERED = 20_000
WHOLE = re.compile(r"(\d{7})(?: \1){15}")


def separators(scratch: Path) -> list[int]:
    """Return the BOS and the EOS id; loaders separate documents by one of them."""
    tokenizer = _load(scratch)
    return [tokenizer.token_to_id(token) for token in (BOS["bytes"], EOS["bytes"])]


def count_documents(
    batches: NDArray[np.int32], rows_are_streams: bool, scratch: Path
) -> dict[str, int]:
    """Count the documents of one epoch that are missing, and those that are repeated.

    With `rows_are_streams`, the epoch is the first part of each row; otherwise it is the first
    documents of all. Later documents are not counted.

    Args:
        batches: Token ids [batches, rows, length].
        rows_are_streams: True if a row continues in the same row of the next batch.
        scratch: Directory with the output of corpus.py.
    """
    rows = batches.transpose(1, 0, 2) if rows_are_streams else batches.reshape(1, -1)
    tokenizer = _load(scratch)
    numbers: list[int] = []
    for row in rows:
        text = tokenizer.decode(row.ravel().tolist(), skip_special_tokens=False)
        found = [WHOLE.fullmatch(piece) for piece in re.split(r"<\|[a-z_]+\|>", text)]
        whole = [int(match.group(1)) for match in found if match]
        numbers += whole[: NUM_NUMBERED // len(rows)]
    distinct = len(set(numbers))
    return {"never": NUM_NUMBERED - distinct, "again": len(numbers) - distinct}


def _load(scratch: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(scratch / "tokenizers" / "bytes" / "tokenizer.json"))
