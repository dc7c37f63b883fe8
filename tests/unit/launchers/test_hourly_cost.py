"""The cost estimate in the output of launchers and of `hlat cluster`."""

from hlat.config.compose import import_launcher_module
from hlat.config.hardware import HardwareConfig


def estimate(**settings) -> str:
    hardware = HardwareConfig(name="p5.48xlarge", nodes=4, **settings)
    return import_launcher_module("_hourly_cost").format_hourly_cost(hardware)


def test_cost_is_nodes_times_price_with_date_and_source():
    text = estimate(price_usd_per_hour=55.04, price_date="2025-12-21", price_source="on-demand")
    assert text == "4 x p5.48xlarge: 220.16 USD per hour at 55.04 USD (2025-12-21, on-demand)"


def test_a_price_of_the_user_needs_no_source():
    text = estimate(price_usd_per_hour=1000)
    assert text.endswith("4,000.00 USD per hour at 1000 USD (hardware.price_usd_per_hour)")


def test_an_unknown_price_is_not_estimated():
    assert estimate().endswith(
        "price unknown; set hardware.price_usd_per_hour to estimate the cost"
    )
