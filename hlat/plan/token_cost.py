"""Cost of 4 million tokens by number of nodes, planned and published: HLAT paper, figure 5.

The paper divides by the cost of its GPU baseline, 7B on four p4d nodes at the prices of its day,
and gives no dollars. That baseline is planned with the constants of A100, which are not fitted to
the figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.mfu import compute_cost_per_4m_tokens
from hlat.config.resolve import resolve_config
from hlat.config.untrusted_files import load_untrusted_yaml
from hlat.plan.memory_estimate import estimate_memory, get_device_memory_bytes
from hlat.plan.step_time import predict_step_time

COMMON_OVERRIDES = ("hardware=trn1_32xl", "engine=nxd", "compiler=neuron_2_28")
"""Overrides of all published runs; hardware.nodes is added."""
PRICES = {"trn1_32xl": 21.50, "a100_p4d": 32.77}
"""USD per node and hour in the HLAT paper, section II."""
_NODE_COUNTS = (4, 8, 16, 32, 64)
_BASELINE_OVERRIDES = (
    *("model=7b", "precision=mixed", "parallelism.tp=4", "parallelism.zero=1"),
    *("hardware=a100_p4d", "hardware.nodes=4"),
    f"hardware.price_usd_per_hour={PRICES['a100_p4d']}",
)
_TRN1_OVERRIDES = (*COMMON_OVERRIDES, f"hardware.price_usd_per_hour={PRICES['trn1_32xl']}")
_MODEL_OVERRIDES = {
    "7B, planned": ("model=7b",),
    "70B, planned": ("model=70b", "precision=mixed"),
}
_PUBLISHED_MODELS = ("HLAT-7B", "Llama-2-70B")
"""Published models of the same shapes."""
_FALLBACK_PIPELINE = "parallelism.pp=4"
"""For 70B on few nodes; on four of them it ran out of memory in the paper."""


class PublishedRun(NamedTuple):
    """Published configuration, with one value of the speed per release of the Neuron SDK.

    `nodes` are trn1.32xlarge instances; `fitted` is True if the constants were fitted to the row.
    """

    name: str
    nodes: int
    overrides: list[str]
    sequences_per_second: list[float]
    fitted: bool = False


def _load_published_runs() -> tuple[PublishedRun, ...]:
    rows = load_untrusted_yaml(Path(__file__).with_name("published_throughput.yaml"))
    for row in rows:
        if "mfu" in row:
            row["sequences_per_second"] = [_compute_speed_of_7b(row.pop("mfu"), row["nodes"])]
    return tuple(PublishedRun(**row) for row in rows)


def _compute_speed_of_7b(mfu: float, nodes: int) -> float:
    """Return sequences/s of HLAT-7B: 42.86 GF per token, 4,096 tokens, 3,040 TFLOP/s per node."""
    return mfu * nodes * 3040e12 / (42.86e9 * 4096)


PUBLISHED_RUNS = _load_published_runs()


@dataclass(frozen=True)
class TokenCost:
    """USD per 4 million tokens of a run; None if the run does not fit into memory."""

    label: str
    nodes: int
    usd: float | None


def compute_baseline_cost() -> float:
    """Return the planned USD per 4 million tokens of the paper's baseline (100%)."""
    cost = _plan_cost("", _BASELINE_OVERRIDES).usd
    assert cost is not None, "the baseline fits"
    return cost


def compute_planned_costs() -> list[TokenCost]:
    """Return the planned costs of the paper's models on its numbers of nodes."""
    costs = []
    for label, model in _MODEL_OVERRIDES.items():
        for nodes in _NODE_COUNTS:
            overrides = (*model, *_TRN1_OVERRIDES, f"hardware.nodes={nodes}")
            try:
                costs.append(_plan_cost(label, overrides))
            except ConfigError:
                costs.append(_plan_cost(label, (*overrides, _FALLBACK_PIPELINE)))
    return costs


def compute_published_costs() -> list[TokenCost]:
    """Return the costs of published throughputs of the same models, the median of each row."""
    costs = []
    for row in PUBLISHED_RUNS:
        model = row.name.partition(",")[0]
        if model in _PUBLISHED_MODELS:
            config = resolve_config(
                compose_config([*row.overrides, *_TRN1_OVERRIDES, f"hardware.nodes={row.nodes}"])
            )
            rate = median(row.sequences_per_second) * config.batch.sequence_length
            cost = compute_cost_per_4m_tokens(config.hardware, rate)
            costs.append(TokenCost(f"{model}, published", row.nodes, cost))
    return costs


def _plan_cost(label: str, overrides: Sequence[str]) -> TokenCost:
    config = resolve_config(compose_config(overrides))
    nodes = config.hardware.nodes
    if estimate_memory(config).total > get_device_memory_bytes(config):
        return TokenCost(label, nodes, None)
    rate = config.batch.tokens_per_step / predict_step_time(config).total
    return TokenCost(label, nodes, compute_cost_per_4m_tokens(config.hardware, rate))
