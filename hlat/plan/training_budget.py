"""Tokens that a budget pays for, by number of nodes, and the compute-optimal model."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.plan.achieved_speed import compute_achieved_speed, get_efficiency
from hlat.plan.forecast import get_step_interval
from hlat.plan.layout_search import MAX_NODES, LayoutCandidate, search_layouts
from hlat.plan.scaling_law import ScalingLaw


@dataclass(frozen=True)
class Price:
    """Price of a node.

    Attributes:
        name: Kind of the price, such as spot.
        usd_per_hour: USD per node and hour.
        origin: Source and date.
    """

    name: str
    usd_per_hour: float
    origin: str


@dataclass(frozen=True)
class BudgetOption:
    """Training on a number of nodes until the budget is spent or the time is over.

    Attributes:
        layout: Fastest layout that fits.
        price: Price of the nodes.
        days: Duration without failures.
        cost_usd: Price of this duration.
        tokens: Tokens of this duration.
        is_efficient: True if no option with the same price has as few days, cost and more tokens.
    """

    layout: LayoutCandidate
    price: Price
    days: float
    cost_usd: float
    tokens: float
    is_efficient: bool = False

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.layout.config.hardware.nodes


@dataclass(frozen=True)
class OptimalModel:
    """Size and tokens with the lowest loss of a compute budget.

    Attributes:
        law: Law of the loss.
        flops: Compute.
        parameters: Parameters of the model.
        tokens: Training tokens.
    """

    law: ScalingLaw
    flops: float
    parameters: float
    tokens: float


@dataclass(frozen=True)
class BudgetPlan:
    """Options of a budget, the one with the most tokens, and the compute-optimal model.

    `tokens_interval` is the 80% interval of the tokens of `best`; it is an estimate unless
    `is_calibrated`.
    """

    budget_usd: float
    max_days: float | None
    options: tuple[BudgetOption, ...]
    best: BudgetOption
    tokens_interval: tuple[float, float]
    is_calibrated: bool
    optimum: OptimalModel


def get_hardware_price(config: Config, is_given: bool) -> Price | None:
    """Return the price in the configuration, if any; `is_given` if the user has set it."""
    hardware = config.hardware
    if hardware.price_usd_per_hour is None:
        return None
    if is_given:
        return Price("given", hardware.price_usd_per_hour, "hardware.price_usd_per_hour=")
    source = hardware.price_source or ""
    kinds = ("on-demand", "capacity block", "reserved", "spot")
    name = next((kind for kind in kinds if kind in source), "list")
    return Price(name, hardware.price_usd_per_hour, f"{source} ({hardware.price_date})")


def plan_budget(
    config: Config,
    budget_usd: float,
    max_days: float | None,
    prices: Sequence[Price],
    law: ScalingLaw,
) -> BudgetPlan:
    """Return the options of a budget on 1, 2, 4 ... nodes.

    Raises:
        ConfigError: There is no price, no layout fits, or the step time is unknown.
    """
    if not prices:
        raise ConfigError(
            f"hardware={config.hardware.name} has no price; set hardware.price_usd_per_hour=X or "
            "prices=spot:X in USD per node and hour"
        )
    compute_achieved_speed(
        replace(config, hardware=replace(config.hardware, nodes=1)), get_efficiency(config)
    )
    layouts = [*_iter_fastest_layouts(config)]
    if not layouts:
        raise ConfigError(
            f"model={config.model.name} fits on no number of nodes of {config.hardware.name} up to "
            f"{MAX_NODES:,}; hlat plan with search=true has the memory that is missing"
        )
    options = [
        _build_option(layout, price, budget_usd, max_days) for price in prices for layout in layouts
    ]
    marked = tuple(replace(one, is_efficient=_is_efficient(one, options)) for one in options)
    best = max(marked, key=lambda option: option.tokens)
    run = best.layout.config
    (low, high), is_calibrated = get_step_interval(run)
    flops = best.tokens * compute_flops_per_token(run.model, run.batch.sequence_length)
    return BudgetPlan(
        budget_usd,
        max_days,
        marked,
        best,
        (best.tokens / high, best.tokens / low),
        is_calibrated,
        OptimalModel(law, flops, *law.allocate(flops)),
    )


def _iter_fastest_layouts(config: Config) -> Iterator[LayoutCandidate]:
    """Yield the fastest layout that fits on each number of nodes."""
    has_nodes = config.hardware.processes_per_node is not None
    for exponent in range(int(math.log2(MAX_NODES)) + 1 if has_nodes else 1):
        hardware = replace(config.hardware, nodes=2**exponent)
        parallelism = replace(config.parallelism, dp=None) if has_nodes else config.parallelism
        layouts = search_layouts(replace(config, hardware=hardware, parallelism=parallelism))
        if exponent and layouts and layouts[0].step_s is None:
            return  # the speed of the network is unknown
        if layouts and layouts[0].fits:
            yield layouts[0]


def _build_option(
    layout: LayoutCandidate, price: Price, budget_usd: float, max_days: float | None
) -> BudgetOption:
    assert layout.step_s is not None
    usd_per_hour = price.usd_per_hour * layout.config.hardware.nodes
    days, cost_usd = budget_usd / usd_per_hour / 24, budget_usd
    if max_days is not None and days > max_days:
        days, cost_usd = max_days, max_days * 24 * usd_per_hour
    tokens = days * 86400 / layout.step_s * layout.config.batch.tokens_per_step
    return BudgetOption(layout, price, days, cost_usd, tokens)


def _is_efficient(option: BudgetOption, options: Sequence[BudgetOption]) -> bool:
    """Return True if no option with the same price needs as few days and USD for more tokens."""
    values = (option.days, option.cost_usd, -option.tokens)
    others = [(one.days, one.cost_usd, -one.tokens) for one in options if one.price == option.price]
    return not any(
        one != values and all(a <= b for a, b in zip(one, values, strict=True)) for one in others
    )
