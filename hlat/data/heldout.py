"""Held-out text packed into sequences, with what turns its loss into bits per byte.

Loss per token depends on the tokenizer; bits per byte do not, so they compare runs across
tokenizers. The sequences are spread over all held-out documents of a source: a few taken from the
first document would measure that document.
"""

from dataclasses import dataclass

import numpy as np

from hlat.config.data import Data
from hlat.config.errors import ConfigError
from hlat.data.sequences import Sequences, counted_targets, in_documents
from hlat.data.source import Source
from hlat.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class HeldOut:
    """Held-out sequences of one source."""

    sequences: Sequences
    """[num_sequences, sequence_length]."""
    tokens_per_byte: float
    """Tokens that the loss counts, eos included, per UTF-8 byte of text that these stand for.

    bits per byte = mean loss in nats per counted token / ln 2 * tokens_per_byte. A token that the
    loss does not count, such as the first of a document under data.loss_mask, brings no bytes
    either: spread over bytes that nothing was asked about, the same loss would look better. So the
    figure with the mask is that of slightly less text. A character that the edge of a sequence or
    the joint of two documents cuts counts whole, an error of a few bytes.
    """


def pack_heldout(
    source: Source, tokenizer: Tokenizer, num_sequences: int, length: int, data: Data
) -> HeldOut:
    """Pack all held-out documents of a source, and take evenly spaced sequences of the result.

    Args:
        source: The source.
        tokenizer: What turns its documents into tokens.
        num_sequences: Sequences wanted; as many as there are if there are fewer.
        length: Tokens of a sequence.
        data: Whether documents are told apart, and which tokens the loss counts.

    Raises:
        ConfigError: If the held-out documents do not fill one sequence, or leave the loss no
            text to count.
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
    rows = packed[: available * length].reshape(available, length)
    chosen = in_documents(rows[np.arange(count) * available // count], tokenizer.eos, data)
    counted = counted_targets(chosen, data.loss_mask)
    text = counted & (chosen.tokens != tokenizer.eos)
    num_bytes = sum(
        len(tokenizer.decode(row[kept]).encode())
        for row, kept in zip(chosen.tokens, text, strict=True)
    )
    if num_bytes == 0:
        raise ConfigError(
            f"data.heldout_documents={source.num_heldout}: those of data.sources.{source.name} "
            f"leave the loss no text in sequences of {length} tokens; hold out more, or set "
            "data.loss_mask=false"
        )
    return HeldOut(chosen, int(counted.sum()) / num_bytes)
