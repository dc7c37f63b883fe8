"""Published throughputs on trn1, as overrides of hlat.plan.

Sequences per second at 1,024 sequences per step, one value per release of the Neuron SDK that lists
one (its documentation, benchmarks/trn1/training_data_decoder.csv and that file's history), or a
fraction of the peak (HLAT's slides, 36). Three constants are fitted to four of the eleven rows.
"""

from dataclasses import dataclass

COMMON_OVERRIDES = ("hardware=trn1_32xl", "engine=nxd", "compiler=neuron_2_28")
"""Overrides of all rows; hardware.nodes is added."""
_MIXED_PRECISION = ("precision=mixed", "parallelism.zero=1")
_8B = (
    "model=7b",
    "model.intermediate_size=14336",
    "model.num_key_value_heads=8",
    "model.vocab_size=128256",
    "batch.sequence_length=8192",
    "parallelism.tp=32",
)
_70B_8K = ("model=70b", "model.vocab_size=128256", "batch.sequence_length=8192")


@dataclass(frozen=True)
class PublishedRun:
    """Published configuration.

    Attributes:
        name: Row name.
        nodes: trn1.32xlarge instances.
        overrides: Overrides of hlat.plan, without hardware.
        sequences_per_second: Published values by release.
        fitted: True if the constants were fitted to the row.
    """

    name: str
    nodes: int
    overrides: tuple[str, ...]
    sequences_per_second: tuple[float, ...]
    fitted: bool = False


def compute_sequences_per_second(mfu: float, nodes: int) -> float:
    """Return sequences/s of HLAT-7B: 42.86 GF per token, 4,096 tokens, 3,040 TFLOP/s per node."""
    return mfu * nodes * 3040e12 / (42.86e9 * 4096)


PUBLISHED_RUNS = (
    PublishedRun(
        "Llama-2-7B, TP8 DP64",
        16,
        ("model=7b", *_MIXED_PRECISION),
        (81, 93.3, 94.7, 92.93, 101.3, 95.14),
    ),
    PublishedRun(
        "HLAT-7B, TP8 DP16",
        4,
        ("model=7b",),
        (compute_sequences_per_second(0.386, 4),),
        fitted=True,
    ),
    PublishedRun(
        "HLAT-7B, TP8 DP128", 32, ("model=7b",), (compute_sequences_per_second(0.335, 32),)
    ),
    PublishedRun(
        "HLAT-7B, TP8 DP256",
        64,
        ("model=7b",),
        (compute_sequences_per_second(0.279, 64),),
        fitted=True,
    ),
    PublishedRun(
        "Llama-2-13B, TP8 PP4 DP32", 32, ("model=13b",), (85.65, 81.8, 87.44), fitted=True
    ),
    PublishedRun("Llama-2-13B, TP8 PP8 DP16", 32, ("model=13b", "parallelism.pp=8"), (84.0, 80.33)),
    PublishedRun(
        "Llama-2-70B, TP32 PP4 DP8", 32, ("model=70b", "parallelism.pp=4"), (15.34, 15.6, 17.86)
    ),
    PublishedRun("Llama-2-70B, TP32 PP8 DP4", 32, ("model=70b",), (14.2, 14.44), fitted=True),
    PublishedRun("Llama-3.1-8B, TP32 DP32", 32, _8B, (49.47, 53.51)),
    PublishedRun("Llama-3.1-8B, TP32 DP32, ZeRO-1", 32, (*_8B, *_MIXED_PRECISION), (41.99, 47.95)),
    PublishedRun("Llama-3.1-70B, TP32 PP8 DP4", 32, _70B_8K, (7.59, 7.97, 7.51, 7.94)),
)
"""Rows without ZeRO-1 are planned in bf16, since NxD has fp32 sums and master weights only with it.
HLAT's MFU on four nodes is 33.5% over the scaling efficiency of 87% on 32 nodes."""
