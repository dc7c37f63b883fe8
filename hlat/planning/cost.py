"""What 4 million tokens cost over numbers of nodes, planned and published: HLAT paper, figure 5.

The paper divides by what its GPU baseline cost, 7B on four p4d nodes at the prices of its day, and
gives no dollars. That baseline is planned here; its constants are fitted to what the figure implies
(hlat.planning.efficiency), so the shares of trn1 are a test and those of p4d are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hlat.config.compose import composed
from hlat.config.errors import ConfigError
from hlat.config.resolve import resolve
from hlat.hardware import cost_per_4m_tokens
from hlat.planning.memory import device_memory, estimate
from hlat.planning.published import OVERRIDES, ROWS
from hlat.planning.step_time import predict

PRICES = {"trn1_32xl": 21.50, "a100_p4d": 32.77}
"""USD per hour and node in the HLAT paper, section II."""
NODES = (4, 8, 16, 32, 64)
_BASELINE = (
    *("model=7b", "precision=mixed", "parallelism.tp=4", "parallelism.zero=1"),
    *("hardware=a100_p4d", "hardware.nodes=4"),
    f"hardware.price_usd_per_hour={PRICES['a100_p4d']}",
)
_TRN1 = (*OVERRIDES, f"hardware.price_usd_per_hour={PRICES['trn1_32xl']}")
_MODELS = {
    "7B, planned": ("model=7b",),
    "70B, planned": ("model=70b", "precision=mixed"),
}
_THE_SAME = ("HLAT-7B", "Llama-2-70B")
"""Published models of the same shapes."""
_SHORTER_PIPELINE = "parallelism.pp=4"
"""Of 70B where the nodes are too few for its own: four of them ran out of memory in the paper."""


@dataclass(frozen=True)
class Cost:
    """Cost of one run.

    Attributes:
        label: What it belongs to.
        nodes: Of the run.
        usd: Per 4 million tokens; None if its memory does not fit.
    """

    label: str
    nodes: int
    usd: float | None


def baseline() -> float:
    """Return what the paper's 100% cost in USD per 4 million tokens, as planned."""
    cost = _planned("", _BASELINE).usd
    assert cost is not None, "the baseline fits"
    return cost


def planned() -> list[Cost]:
    """Return the paper's models on its numbers of nodes, as planned."""
    found = []
    for label, words in _MODELS.items():
        for nodes in NODES:
            asked = (*words, *_TRN1, f"hardware.nodes={nodes}")
            try:
                found.append(_planned(label, asked))
            except ConfigError:
                found.append(_planned(label, (*asked, _SHORTER_PIPELINE)))
    return found


def published() -> list[Cost]:
    """Return what published throughputs of the same models come to, the median of each row."""
    found = []
    for row in ROWS:
        model = row.name.partition(",")[0]
        if model in _THE_SAME:
            config = resolve(composed([*row.overrides, *_TRN1, f"hardware.nodes={row.nodes}"]))
            rate = median(row.sequences_per_second) * config.batch.sequence_length
            cost = cost_per_4m_tokens(config.hardware, rate)
            found.append(Cost(f"{model}, published", row.nodes, cost))
    return found


def _planned(label: str, words: Sequence[str]) -> Cost:
    config = resolve(composed(words))
    nodes = config.hardware.nodes
    if estimate(config).total > device_memory(config):
        return Cost(label, nodes, None)
    rate = config.batch.tokens_per_step / predict(config).total
    return Cost(label, nodes, cost_per_4m_tokens(config.hardware, rate))
