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
    """Tokens, eos included, per UTF-8 byte of all held-out documents of the source.

    bits per byte = mean loss in nats per token / ln 2 * tokens_per_byte.
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
    num_bytes = sum(len(text.encode()) for text in texts)
    chosen = np.arange(count) * available // count
    return HeldOut(sequences[chosen], len(packed) / num_bytes)
