"""Throughputs that others have published for trn1, as overrides that anybody can plan.

Sequences per second of 1,024 sequences a step, one number for each release of the Neuron SDK that
printed one (its documentation, benchmarks/trn1/training_data_decoder.csv and that file's history),
or a share of the peak (HLAT's slides, 36). Three constants are fitted to four of the eleven rows;
the others are predicted.
"""

from dataclasses import dataclass

OVERRIDES = ("hardware=trn1_32xl", "engine=nxd", "compiler=neuron_2_28")
"""What all rows share, beside hardware.nodes."""
_MIXED = ("precision=mixed", "parallelism.zero=1")
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
class Published:
    """One configuration.

    Attributes:
        name: As a table tells it.
        nodes: trn1.32xlarge instances.
        overrides: Of hlat.plan, beside the hardware.
        sequences_per_second: What was published, release by release.
        fitted: Whether the constants were fitted to it.
    """

    name: str
    nodes: int
    overrides: tuple[str, ...]
    sequences_per_second: tuple[float, ...]
    fitted: bool = False


def of_mfu(mfu: float, nodes: int) -> float:
    """Sequences per second of HLAT-7B: 42.86 GF a token, 4,096 tokens, 3,040 TFLOP/s a node."""
    return mfu * nodes * 3040e12 / (42.86e9 * 4096)


ROWS = (
    Published(
        "Llama-2-7B, TP8 DP64",
        16,
        ("model=7b", *_MIXED),
        (81, 93.3, 94.7, 92.93, 101.3, 95.14),
    ),
    Published("HLAT-7B, TP8 DP16", 4, ("model=7b",), (of_mfu(0.386, 4),), fitted=True),
    Published("HLAT-7B, TP8 DP128", 32, ("model=7b",), (of_mfu(0.335, 32),)),
    Published("HLAT-7B, TP8 DP256", 64, ("model=7b",), (of_mfu(0.279, 64),), fitted=True),
    Published("Llama-2-13B, TP8 PP4 DP32", 32, ("model=13b",), (85.65, 81.8, 87.44), fitted=True),
    Published("Llama-2-13B, TP8 PP8 DP16", 32, ("model=13b", "parallelism.pp=8"), (84.0, 80.33)),
    Published(
        "Llama-2-70B, TP32 PP4 DP8", 32, ("model=70b", "parallelism.pp=4"), (15.34, 15.6, 17.86)
    ),
    Published("Llama-2-70B, TP32 PP8 DP4", 32, ("model=70b",), (14.2, 14.44), fitted=True),
    Published("Llama-3.1-8B, TP32 DP32", 32, _8B, (49.47, 53.51)),
    Published("Llama-3.1-8B, TP32 DP32, ZeRO-1", 32, (*_8B, *_MIXED), (41.99, 47.95)),
    Published("Llama-3.1-70B, TP32 PP8 DP4", 32, _70B_8K, (7.59, 7.97, 7.51, 7.94)),
)
"""Rows without ZeRO-1 are planned in bf16, as NxD keeps wider sums and copies with it alone. HLAT's
on four nodes is 33.5% over the 87% that 32 nodes keep of it."""
