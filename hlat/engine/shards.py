"""What one rank holds of each parameter: the plan, applied to the coalesced layout.

Both engines shard alike, so both ask here, and a checkpoint written by one is read by the other.
"""

from dataclasses import dataclass

from hlat.config.model import Model
from hlat.model import coalesced
from hlat.model.coalesced import Rows
from hlat.parallelism.plan import Rule, rule


@dataclass(frozen=True)
class Shard:
    """A part of a parameter of llama.Llama.

    Attributes:
        rows: What it holds, from its first row to its last.
        num_owned: Rows, from the first on, that are this rank's to save and to count in norms;
            those after them are copies of what another rank owns.
        columns: The first canonical column and their number; None for a vector.
    """

    rows: tuple[Rows, ...]
    num_owned: int
    columns: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds it."""
        num_rows = coalesced.count(self.rows)
        return (num_rows,) if self.columns is None else (num_rows, self.columns[1])

    def cut(self, start: int, stop: int) -> "Shard":
        """Its rows from `start` to `stop`, or to its end."""
        owned = min(max(self.num_owned - start, 0), stop - start)
        return Shard(coalesced.cut(self.rows, start, stop), owned, self.columns)


def shard(
    model: Model, name: str, shape: tuple[int, ...], tp: int, rank: int, consecutive: bool = True
) -> Shard:
    """What a tensor-parallel rank holds of a parameter.

    The vocabulary is cut into equal parts, the last of which may be shorter: nothing is padded.
    With more ranks than key/value heads, some ranks share a head and each holds a copy.

    Args:
        model: Shape of the model.
        name: Parameter name of llama.Llama.
        shape: Shape of the whole parameter.
        tp: Tensor-parallel degree, which the rules have accepted for the model.
        rank: Which of the ranks.
        consecutive: Whether ranks that share a head follow one another; else they are as far apart
            as there are heads.
    """
    rows = coalesced.rows(model, name, shape[0])
    columns = (0, shape[1]) if len(shape) == 2 else None
    found = rule(rows[0].name)
    if found is Rule.norm:
        return Shard(rows, shape[0] if rank == 0 else 0, columns)
    if found is Rule.row:
        assert columns is not None
        width, place = shape[1] // tp, rank
        if name.endswith(".o_proj.weight"):  # which reads what this rank's query heads give
            group, copy = head_of(model, tp, rank, consecutive)
            place = group * kv_copies(model, tp) + copy
        return Shard(rows, shape[0], (place * width, width))
    if name.endswith(".qkv_proj.weight") and kv_copies(model, tp) > 1:
        head = head_of(model, tp, rank, consecutive)
        return _shared_head(model, rows[0].name.replace("q_proj", "qkv_proj"), tp, head, columns)
    step = -(-shape[0] // tp)
    part = coalesced.cut(rows, rank * step, (rank + 1) * step)
    return Shard(part, coalesced.count(part), columns)


def kv_copies(model: Model, tp: int) -> int:
    """Tensor-parallel ranks that hold the same key/value head: 1, or more where tp exceeds them."""
    return max(1, tp // model.num_key_value_heads)


def head_of(model: Model, tp: int, rank: int, consecutive: bool = True) -> tuple[int, int]:
    """The key/value head, or group of heads, of a rank, and which of its copies that is."""
    copies = kv_copies(model, tp)
    if consecutive:
        return divmod(rank, copies)
    copy, group = divmod(rank, tp // copies)
    return group, copy


def _shared_head(
    model: Model, name: str, tp: int, head: tuple[int, int], columns: tuple[int, int] | None
) -> Shard:
    group, copy = head
    queries = model.num_attention_heads // tp
    rows = coalesced.qkv_rows(model, name, [group], queries, copy * queries)
    return Shard(rows, coalesced.count(rows if copy == 0 else rows[:1]), columns)
