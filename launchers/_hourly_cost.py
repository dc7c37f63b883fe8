"""Cost estimate of nodes, for the output of commands that reserve or request them."""

from hlat.config.hardware import HardwareConfig


def format_hourly_cost(hardware: HardwareConfig) -> str:
    """Return the number of nodes times the price of one, with date and source of the price."""
    nodes = f"{hardware.nodes} x {hardware.name}"
    price = hardware.price_usd_per_hour
    if price is None:
        return f"{nodes}: price unknown; set hardware.price_usd_per_hour to estimate the cost"
    total = f"{hardware.nodes * price:,.2f} USD per hour"
    origin = ", ".join(filter(None, (hardware.price_date, hardware.price_source)))
    return f"{nodes}: {total} at {price:g} USD ({origin or 'hardware.price_usd_per_hour'})"
