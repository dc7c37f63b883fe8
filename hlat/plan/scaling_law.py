"""Law of the loss over parameters and tokens: a published one, or the result of `hlat fit`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.untrusted_files import format_value, load_untrusted_json

_CONSTANTS = ("E", "A", "alpha", "B", "beta")
_MAX_LOG = 200.0
"""Largest logarithm of a number of parameters or tokens, of either sign."""
_FLOPS_KEY = "flops_per_parameter_and_token"


@dataclass(frozen=True)
class ScalingLaw:
    """Loss E + A / N^alpha + B / D^beta of N parameters and D tokens.

    Attributes:
        name: Source of the constants.
        flops_factor: FLOPs per parameter and token.
        warnings: Limits of the fit.
    """

    name: str
    E: float
    A: float
    alpha: float
    B: float
    beta: float
    flops_factor: float = 6.0
    warnings: tuple[str, ...] = ()

    def allocate(self, flops: float) -> tuple[float, float]:
        """Return the parameters and tokens with the lowest loss for a compute budget.

        Source: Hoffmann et al., arXiv 2203.15556, equation 4.

        Raises:
            ConfigError: They are not finite numbers.
        """
        log_product = math.log(flops) - math.log(self.flops_factor)
        log_ratio = math.log(self.alpha) + math.log(self.A)
        log_ratio -= math.log(self.beta) + math.log(self.B)
        log_parameters = (log_ratio + self.beta * log_product) / (self.alpha + self.beta)
        if max(abs(log_parameters), abs(log_product - log_parameters)) > _MAX_LOG:
            raise ConfigError(f"law={self.name} has no optimum at {flops:.3g} FLOPs")
        return math.exp(log_parameters), math.exp(log_product - log_parameters)


PUBLISHED_LAW = ScalingLaw(
    "Hoffmann et al. 2022 as corrected by Besiroglu et al. 2024, arXiv 2404.10102",
    E=1.8172,
    A=482.01,
    alpha=0.3478,
    B=2085.43,
    beta=0.3658,
)
"""Fit of the replication to the points of Hoffmann et al., with C = 6 N D."""


def load_law(file: Path) -> ScalingLaw:
    """Return the law in the JSON output of `hlat fit`.

    Raises:
        ConfigError: The file cannot be read, or contains no law.
    """
    content = load_untrusted_json(file)
    fit = content.get("law") if isinstance(content, dict) else None
    constants = fit.get("constants") if isinstance(fit, dict) else None
    if not isinstance(fit, dict) or not isinstance(constants, dict):
        raise ConfigError(
            f"law={format_value(file, 200)} contains no law; write it with hlat fit runs json=true "
            "> FILE"
        )
    values = {name: _get_value(file, name, constants.get(name)) for name in _CONSTANTS}
    factor = _get_value(file, _FLOPS_KEY, {"value": fit.get(_FLOPS_KEY)})
    warnings = content.get("warnings")
    texts = [format_value(one, 300) for one in warnings] if isinstance(warnings, list) else []
    source = format_value(content.get("source"), 200)
    name = f"{format_value(file, 200)}, fitted to {content.get('points')} points of {source}"
    return ScalingLaw(name, **values, flops_factor=factor, warnings=tuple(texts))


def _get_value(file: Path, name: str, interval: Any) -> float:
    value: Any = interval.get("value") if isinstance(interval, dict) else None
    is_number = isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)
    if is_number and math.isfinite(value) and (value > 0 or (name == "E" and value == 0)):
        return float(value)
    raise ConfigError(
        f"law={format_value(file, 200)} has {name}={format_value(value)}, which is not a number "
        "above 0; write it with hlat fit runs json=true > FILE"
    )
