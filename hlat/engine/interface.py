"""The seam between the story of a run and the machinery that executes it.

It is coarse because a pipeline engine runs a whole batch in one call. Batches are NumPy, numbers
come back only when `read` is called, and no rank, mesh or library name crosses it, so train.py
reads the same on every engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hlat.checkpoint.chunk import Chunk
from hlat.config.run import Config
from hlat.data.sequences import Sequences
from hlat.parallelism.group import Alone, Group


@dataclass(frozen=True)
class World:
    """Place of this process among all processes of the run."""

    rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    peers: Group | None = None
    """The ranks that hold parts of the same replica of the model; None: this one holds all."""
    everyone: Group = field(default_factory=Alone)
    """All ranks of the run."""
    background: Group = field(default_factory=Alone)
    """The same for a thread beside the training loop: what two threads say must not mix."""

    @property
    def share(self) -> tuple[int, int, Group | None]:
        """What decides which sequences this rank draws, and with whom: rank, size, peers."""
        return self.dp_rank, self.dp_size, self.peers

    @property
    def chief(self) -> bool:
        """Whether this process writes the logs of the run."""
        return self.rank == 0


@dataclass(frozen=True)
class Numbers:
    """What one step or evaluation showed.

    Attributes:
        loss: Mean cross-entropy in nats per counted token, over the global batch.
        grad_norm: Global l2 norm of the gradients before clipping, fp32; None after an evaluation.
        param_norm: Global l2 norm of the weights after the step, fp32; None after an evaluation.
        num_skipped: Steps since the engine was built that changed nothing, because their gradients
            were not finite.
    """

    loss: float
    grad_norm: float | None = None
    param_norm: float | None = None
    num_skipped: int = 0

    @property
    def measured(self) -> dict[str, float | None]:
        """Loss and norms by name."""
        return {"loss": self.loss, "grad_norm": self.grad_norm, "param_norm": self.param_norm}


@dataclass(frozen=True)
class Link:
    """What one rank saw when the ranks along an axis of the mesh added up numbers that are known.

    Attributes:
        axis: The axis' name.
        ranks: Global ranks along it.
        num_wrong: Elements of the sums that came out wrong on this rank.
        wrong_pairs: Where a sum was wrong, this rank and each, or itself, whose contribution
            arrived here with a wrong element.
        bytes_per_s: Bandwidth of a sum, as a ring would use each rank's link.
        expected_bytes_per_s: The link's own, as configured; None: not known.
        slow_pairs: Where a sum was too slow, this rank and each neighbour to whom its link is.
    """

    axis: str
    ranks: list[int]
    num_wrong: int
    wrong_pairs: list[list[int]]
    bytes_per_s: float
    expected_bytes_per_s: float | None
    slow_pairs: list[list[int]]


@dataclass(frozen=True)
class Examination:
    """What one rank's device and its links showed while nothing else ran, as JSON knows it.

    Attributes:
        device: The device's own name.
        free_bytes: Memory of the device that nobody holds; None: it does not tell.
        total_bytes: All memory of the device; None: it does not tell.
        num_products: Matrix products of which every element was compared with the known answer.
        num_wrong: Elements of them that were wrong.
        flops_per_s: Speed of the products in FLOP/s.
        links: One per axis along which there are other ranks.
    """

    device: str
    free_bytes: int | None
    total_bytes: int | None
    num_products: int
    num_wrong: int
    flops_per_s: float
    links: list[Link]


@dataclass(frozen=True)
class Disagreement:
    """A slice of the state of which ranks hold copies that differ, as JSON knows it.

    Attributes:
        name: Kind and canonical name of the tensor.
        ranks: Global ranks along an axis of the mesh that hold a copy.
        odd: Those whose copy differs from that of more than half of them; empty: there is none.
    """

    name: str
    ranks: list[int]
    odd: list[int]


class Texts(Protocol):
    """Some texts as far as the model has read them, with what it keeps of their tokens.

    All ranks that hold parts of a replica do the same with theirs, and get the same answers. They
    are of no use any more when the engine trains again.
    """

    def select(self, rows: NDArray[np.int64], room: int) -> "Texts":
        """Make texts that begin like some of these.

        Args:
            rows: Which, [n], each any number of times.
            room: Tokens that there is to be room for behind the longest of them. Without any, texts
                that have no tokens may be read on once all the same, and keep nothing.
        """
        ...

    def extend(self, tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Read on in each text.

        Args:
            tokens: [n, s], whatever ids fill up rows at the end. They need room for s.
            counts: How many of each row are the text's, [n].
        """
        ...

    def log_probs(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Tell how likely tokens would be at some places; softmax is in fp32 in every recipe.

        Args:
            rows: Which text each question is about, [q].
            places: Behind which of the tokens that `extend` was given last, [q].
            tokens: Which token, [q].

        Returns:
            Natural logarithms of the probabilities, and the likeliest token there; both [q].
        """
        ...

    def draw(
        self, rows: NDArray[np.int64], chances: NDArray[np.int64], temperature: float, top_p: float
    ) -> NDArray[np.int32]:
        """Draw the next token of texts.

        Args:
            rows: Of which texts, [q], each any number of times.
            chances: What decides each draw, uniform in range(2**32), [q].
            temperature: Logits are divided by it before the softmax; 0: the likeliest, no chance.
            top_p: Only of the likeliest tokens, as few as hold this share of the probability.
        """
        ...


Pending = Any
"""Numbers that still lie on the device; only `Engine.read` looks inside."""


class Engine(Protocol):
    """One process's share of the training machinery.

    It honours data.document_mask in attention and positions, and data.loss_mask in sum and
    denominator of the loss, or is refused by the rules.
    """

    world: World
    """Known, as the device is, once the engine has examined or built anything."""
    device: str
    """The device's own name, for the record."""

    def examine(self, config: Config) -> Examination:
        """Compute and add up what is known with this process's device and links; all ranks do so.

        It comes before `build`, while the device's memory is free.

        Raises:
            MissingDeviceError: This process has no device.
        """
        ...

    def build(self, config: Config, trains: bool = True) -> None:
        """Make this process's share of the model, initialised by (seed, name, index).

        Args:
            config: The run.
            trains: Whether steps are to follow. Otherwise there are the weights that the model
                computes with and nothing else, in memory and in `chunks`.

        Raises:
            ConfigError: This engine or its device cannot.
        """
        ...

    def train_step(self, sequences: Sequences, learning_rate: float) -> Pending:
        """Run one optimizer step over all micro batches; nothing waits for the device.

        Gradients that are not finite change nothing: not a bit of weights, moments and counts.

        Args:
            sequences: This data-parallel rank's, [global_batch_size / dp, sequence_length].
            learning_rate: The rate used in this very step.
        """
        ...

    def eval_step(self, sequences: Sequences) -> Pending:
        """Measure the loss of what counts of any number of sequences, [n, s]; change nothing."""
        ...

    def texts(self) -> Texts:
        """One text without tokens, from which all others are made; reading them changes nothing.

        Ranks with other replicas need not do the same.

        Raises:
            ConfigError: This engine or layout cannot.
        """
        ...

    def read(self, pending: Pending) -> Numbers:
        """Fetch the numbers of the newest step or of an evaluation: the only host sync."""
        ...

    def peak_memory(self) -> int | None:
        """The most bytes that this process has ever held of its device's memory.

        Of main memory where that is the device's; None: the device does not tell. Nobody waits.
        """
        ...

    def chunks(self) -> Iterator[Chunk]:
        """Every tensor of the state as the checkpoint store reads and fills it."""
        ...

    def compare_copies(self) -> list[Disagreement]:
        """What of the state this rank and others hold copies of that differ; all ranks do so."""
        ...

    def close(self) -> None:
        """Release processes groups and memory."""
        ...
