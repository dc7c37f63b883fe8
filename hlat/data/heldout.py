"""Held-out text packed into sequences, with what turns its loss into bits per byte.

Loss per token depends on the tokenizer; bits per byte do not, so they compare runs across
tokenizers. The sequences are spread over all held-out documents of a source: a few taken from the
first document would measure that document.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.config.errors import ConfigError
from hlat.data.source import Source
from hlat.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class HeldOut:
    """Held-out sequences of one source."""

    tokens: NDArray[np.int32]
    """Token ids [sequences, sequence_length]."""
    tokens_per_byte: float
    """Predicted tokens, eos included, per UTF-8 byte of text that they stand for.

    bits per byte = mean loss in nats per predicted token / ln 2 * tokens_per_byte. A character that
    the edge of a sequence cuts counts whole, an error of a few bytes per sequence.
    """


def pack_heldout(source: Source, tokenizer: Tokenizer, num_sequences: int, length: int) -> HeldOut:
    """Pack all held-out documents of a source, and take evenly spaced sequences of the result.

    Args:
        source: The source.
        tokenizer: What turns its documents into tokens.
        num_sequences: Sequences wanted; as many as there are if there are fewer.
        length: Tokens of a sequence.

    Raises:
        ConfigError: If the held-out documents do not fill one sequence.
    """
    assert num_sequences >= 1
    texts = list(source.heldout_texts())
    packed = np.concatenate([np.empty(0, np.int32), *tokenizer.encode(texts)])
    available = len(packed) // length
    if available == 0:
        raise ConfigError(
            f"data.heldout_documents={source.num_heldout}: those of data.sources.{source.name} "
            f"hold {len(packed)} tokens, less than one sequence of {length}; hold out more"
        )
    count = min(num_sequences, available)
    sequences = packed[: available * length].reshape(available, length)
    chosen = sequences[np.arange(count) * available // count]
    predicted = chosen[:, 1:]
    num_bytes = sum(len(tokenizer.decode(row[row != tokenizer.eos]).encode()) for row in predicted)
    return HeldOut(chosen, predicted.size / num_bytes)
