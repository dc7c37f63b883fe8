"""Settings of `hlat plan budget_usd=`."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.argument_parser import CommandLineParser, parse_number
from hlat.config.config_errors import ConfigError

if TYPE_CHECKING:
    from hlat.config.run import Config
    from hlat.plan.training_budget import BudgetPlan


def add_budget_settings(parser: CommandLineParser) -> None:
    """Add the settings of a budget to `hlat plan`."""
    parse = partial(parse_number, integer=False, positive=True)
    budget = "tokens that this budget pays for, and the compute-optimal model"
    parser.add_argument("--budget-usd", type=parse, metavar="USD", help=budget)
    parser.add_argument("--days", type=parse, metavar="N", help="longest duration, for budget_usd=")
    prices = "USD of a node and hour, such as spot:20,reserved:35, for budget_usd="
    parser.add_argument("--prices", type=_parse_prices, metavar="NAME:USD", help=prices)
    law = "JSON output of hlat fit with the law of the compute-optimal model, for budget_usd="
    parser.add_argument("--law", type=Path, metavar="FILE", help=law)


def _parse_prices(text: str) -> dict[str, float]:
    prices = {}
    for item in text.removeprefix("[").removesuffix("]").split(","):
        name, _, value = item.partition(":")
        if not name.isidentifier() or name in prices:
            raise argparse.ArgumentTypeError(f"{item} is not NAME:USD, such as spot:20")
        prices[name] = parse_number(value, integer=False, positive=True)
    return prices


def validate_budget_settings(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if settings of a budget are combined with others."""
    if arguments.budget_usd is None:
        for key in ("days", "prices", "law"):
            if getattr(arguments, key) is not None:
                raise ConfigError(f"{key}= is for a budget; add budget_usd=, or remove it")
        return
    from hlat.config.sweep_axes import is_sweep

    others = [key for key in ("search", "mfu", "figure") if getattr(arguments, key)]
    if others or is_sweep(arguments.overrides):
        other = f"{others[0]}=" if others else "the values of a sweep"
        raise ConfigError(
            f"budget_usd={arguments.budget_usd:g} plans one model in its fastest layouts; remove "
            f"{other}"
        )


def plan_configured_budget(config: "Config", arguments: argparse.Namespace) -> "BudgetPlan":
    """Return what the configured model can be trained on, and the compute-optimal model."""
    from hlat.plan import scaling_law, training_budget

    law = scaling_law.PUBLISHED_LAW
    if arguments.law is not None:
        law = scaling_law.load_law(arguments.law)
    key = "hardware.price_usd_per_hour="
    is_given = any(word.startswith(key) for word in arguments.overrides)
    listed = training_budget.get_hardware_price(config, is_given)
    prices = [listed] if listed else []
    for name, usd_per_hour in (arguments.prices or {}).items():
        prices.append(training_budget.Price(name, usd_per_hour, "prices="))
    return training_budget.plan_budget(config, arguments.budget_usd, arguments.days, prices, law)
