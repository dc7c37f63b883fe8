"""Held-out documents packed into sequences, and the factor from loss to bits per byte.

Loss per token depends on the tokenizer; bits per byte compare runs across tokenizers. The sequences
are spread evenly over all held-out documents of a source, so that they represent it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.config.data import DataConfig
from hlat.data.data_source import DataSource
from hlat.data.packed_sequences import PackedSequences, build_packed_sequences, compute_loss_mask
from hlat.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class HeldoutSequences:
    """Held-out sequences of one source."""

    sequences: PackedSequences
    """[num_sequences, sequence_length]."""
    tokens_per_byte: float
    """Tokens in the loss, including EOS and BOS, per UTF-8 byte of their text.

    bits per byte = mean loss in nats per token in the loss / ln 2 * tokens_per_byte. The bytes of a
    token that the loss excludes (the first token of a document under data.loss_mask) are excluded
    too; including them would lower the result. A character divided by the edge of a sequence or of
    a document counts as a whole, an error of a few bytes.
    """


def pack_heldout_sequences(
    source: DataSource,
    tokenizer: Tokenizer,
    num_sequences: int,
    sequence_length: int,
    data: DataConfig,
) -> HeldoutSequences:
    """Pack all held-out documents of a source and select up to `num_sequences`, evenly spaced.

    Raises:
        ConfigError: If the held-out documents are shorter than one sequence, or the loss mask
            excludes all text.
    """
    return pack_documents(
        list(source.read_heldout_documents()),
        tokenizer,
        num_sequences,
        sequence_length,
        data,
        f"data.heldout_documents={source.num_heldout_documents}: those of "
        f"data.sources.{source.name}",
        "hold out more",
    )


def pack_documents(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    num_sequences: int | None,
    sequence_length: int,
    data: DataConfig,
    label: str,
    remedy: str,
) -> HeldoutSequences:
    """Pack documents and select up to `num_sequences` sequences, evenly spaced; None: all.

    `label` and `remedy` are parts of the messages.

    Raises:
        ConfigError: If the documents are shorter than one sequence, or the loss mask excludes all
            text.
    """
    assert num_sequences is None or num_sequences >= 1
    packed = np.concatenate([np.empty(0, np.int32), *tokenizer.encode(documents)])
    available = len(packed) // sequence_length
    if available == 0:
        raise ConfigError(
            f"{label} hold {len(packed)} tokens, less than one sequence of {sequence_length}; "
            f"{remedy}"
        )
    count = available if num_sequences is None else min(num_sequences, available)
    rows = packed[: available * sequence_length].reshape(available, sequence_length)
    selected = rows[np.arange(count) * available // count]
    eos_token_id, bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
    sequences = build_packed_sequences(selected, eos_token_id, data, bos_token_id)
    loss_mask = compute_loss_mask(sequences, data.loss_mask)
    text_mask = loss_mask & (selected != eos_token_id)
    if bos_token_id is not None:
        text_mask &= selected != bos_token_id
    num_bytes = sum(
        len(tokenizer.decode(row[mask]).encode())
        for row, mask in zip(selected, text_mask, strict=True)
    )
    if num_bytes == 0:
        raise ConfigError(
            f"{label} leave the loss no text in sequences of {sequence_length} tokens; {remedy}, "
            "or set data.loss_mask=false"
        )
    return HeldoutSequences(sequences, int(loss_mask.sum()) / num_bytes)
