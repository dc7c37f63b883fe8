"""Rank of a process and the groups over which it exchanges objects."""

from dataclasses import dataclass, field

from hlat.distributed.object_group import ObjectGroup, SingleRankGroup


@dataclass(frozen=True)
class ParallelState:
    """Rank of this process and its groups; Megatron-LM has them in its module parallel_state."""

    rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    model_parallel_group: ObjectGroup | None = None
    """Ranks of the same model replica; None if this rank holds a full replica."""
    world_group: ObjectGroup = field(default_factory=SingleRankGroup)
    """All ranks of the run."""
    background_group: ObjectGroup = field(default_factory=SingleRankGroup)
    """All ranks of the run, for a background thread: two threads must not share a group."""

    @property
    def data_shard(self) -> tuple[int, int, ObjectGroup | None]:
        """Data-parallel rank and size, and the group that shares this rank's batches."""
        return self.dp_rank, self.dp_size, self.model_parallel_group

    @property
    def is_rank0(self) -> bool:
        """True if rank == 0."""
        return self.rank == 0
