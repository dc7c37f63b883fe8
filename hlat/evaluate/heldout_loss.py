"""Loss and bits per byte of held-out text by source, with standard errors over documents.

Tokens of a document are not independent, so the documents are the sample. The loss of a source is a
ratio of two sums over documents, whose standard error is that of its linearization (Cochran 1977,
Sampling Techniques, section 6.4; clusters as in Miller 2024, arXiv 2411.00640).
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.data.heldout_sequences import HeldoutSequences
from hlat.engine.interface import Engine

MAX_CLUSTERS = 32
"""Groups of documents of a source whose sums an event contains."""
_MAX_TOKENS_PER_CALL = 1 << 20


@dataclass(frozen=True)
class HeldoutLoss:
    """Loss of a source: sums over the targets of each document, [documents].

    An engine that returns no loss per token gives the sums of all documents, [1].
    """

    nats: NDArray[np.float64]
    num_tokens: NDArray[np.float64]
    num_bytes: NDArray[np.float64]
    num_documents: int
    digest: str

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per target token."""
        return float(self.nats.sum() / self.num_tokens.sum())

    @property
    def bits_per_byte(self) -> float:
        """Sum of the loss in bits over the source bytes of the targets."""
        return float(self.nats.sum() / math.log(2) / self.num_bytes.sum())

    @property
    def stderr(self) -> float:
        """Standard error of the bits per byte over documents; NaN with fewer than two."""
        return compute_ratio_stderr(self.nats / math.log(2), self.num_bytes)

    @property
    def clusters(self) -> dict[str, list[float]]:
        """Bits and source bytes of up to `MAX_CLUSTERS` groups of documents."""
        index = np.arange(len(self.nats)) % MAX_CLUSTERS
        bits, num_bytes = (
            np.bincount(index, values) for values in (self.nats / math.log(2), self.num_bytes)
        )
        return {"bits": bits.round(3).tolist(), "bytes": num_bytes.tolist()}


def compute_ratio_stderr(
    numerators: NDArray[np.float64], denominators: NDArray[np.float64]
) -> float:
    """Return the standard error of sum(numerators) / sum(denominators) over clusters."""
    count, total = len(numerators), denominators.sum()
    if count < 2:
        return math.nan
    residuals = numerators - numerators.sum() / total * denominators
    return float(math.sqrt(count / (count - 1) * (residuals**2).sum()) / total)


def compute_heldout_loss(engine: Engine, text: HeldoutSequences) -> HeldoutLoss:
    """Evaluate the text of a source; all ranks call it."""
    num_rows, length = text.documents.shape
    rows_per_call = max(1, _MAX_TOKENS_PER_CALL // length)
    parts = [
        text.select(slice(start, start + rows_per_call))
        for start in range(0, num_rows, rows_per_call)
    ]
    nats = np.sum([_sum_losses(engine, part) for part in parts], axis=0)
    used = text.target_tokens > 0
    if len(nats) == len(used):
        sums = nats[used], text.target_tokens[used], text.target_bytes[used]
    else:
        sums = nats, text.target_tokens.sum(keepdims=True), text.target_bytes.sum(keepdims=True)
    return HeldoutLoss(*sums, int(used.sum()), text.digest)


def _sum_losses(engine: Engine, text: HeldoutSequences) -> NDArray[np.float64]:
    """Return the sum of the loss in nats of each document, or of all [1]."""
    metrics = engine.read_metrics(engine.eval_step(text.sequences))
    if metrics.token_losses is None:
        num_targets = text.is_target.sum()  # without any, the loss is NaN
        return np.array([metrics.loss * num_targets if num_targets else 0.0])
    return text.sum_by_document(np.pad(metrics.token_losses, ((0, 0), (1, 0))))


def summarize(losses: Mapping[str, HeldoutLoss]) -> dict[str, Any]:
    """Return the fields of an `evaluate` event: values by source, and the mean over sources.

    Each source has the same weight in the mean. `stderr` is that of `bits_per_byte`, and lacks the
    sources that have none. `text` identifies the evaluated text.
    """
    loss = {name: one.loss for name, one in losses.items()}
    bits = {name: one.bits_per_byte for name, one in losses.items()}
    stderr = {name: one.stderr for name, one in losses.items()}
    loss["mean"] = sum(loss.values()) / len(losses)
    bits["mean"] = sum(bits.values()) / len(losses)
    stderr["mean"] = math.sqrt(sum(value**2 for value in stderr.values())) / len(losses)
    digests = "".join(f"{name}:{one.digest};" for name, one in losses.items())
    return {
        "loss": loss,
        "bits_per_byte": bits,
        "stderr": {name: value for name, value in stderr.items() if not math.isnan(value)},
        "tokens": {name: int(one.num_tokens.sum()) for name, one in losses.items()},
        "bytes": {name: int(one.num_bytes.sum()) for name, one in losses.items()},
        "documents": {name: one.num_documents for name, one in losses.items()},
        "text": hashlib.blake2b(digests.encode(), digest_size=8).hexdigest(),
    }
