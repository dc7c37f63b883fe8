"""Initial values and update settings of the parameters of each role, after a parametrization."""

from dataclasses import asdict, dataclass
from typing import Any

from hlat.config.run import Config
from hlat.model.decoder_spec import compute_init_std, list_parameter_specs
from hlat.model.parameter_spec import Initialization
from hlat.model.parametrization_spec import (
    compute_attention_scale,
    compute_output_multiplier,
    compute_residual_multiplier,
)
from hlat.optim.optimizer_spec import get_optimizer_spec
from hlat.optim.parametrization import compute_update_settings
from hlat.tracking.text_format import format_count, format_short, format_table

_HEADERS = ["role", "parameters", "initial std", "learning rate", "weight decay", "eps"]


@dataclass
class RoleSettings:
    """Settings of the parameters of a role.

    Attributes:
        role: Value of the role.
        num_parameters: Elements of all parameters.
        init_std: Smallest and largest standard deviation of normal initial values; None: constant.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, a factor of the learning rate.
        eps: Added to the root of the second moment; None: the update has none.
    """

    role: str
    num_parameters: int
    init_std: tuple[float, float] | None
    lr: float
    weight_decay: float
    eps: float | None


def list_role_settings(config: Config) -> list[RoleSettings]:
    """Return the settings of each role that the model has, in the order of the forward pass."""
    model, settings = config.model, config.optimizer
    specs, optimizer = list_parameter_specs(model), get_optimizer_spec(settings.name)
    roles = []
    for role in dict.fromkeys(spec.role for spec in specs):
        own = [spec for spec in specs if spec.role is role]
        stds = [compute_init_std(s, model) for s in own if s.init is Initialization.normal]
        update = compute_update_settings(settings, role, model)
        has_eps = "eps" in optimizer.build_hyperparameters(settings, role)
        roles.append(
            RoleSettings(
                role.value,
                sum(spec.numel for spec in own),
                (min(stds), max(stds)) if stds else None,
                settings.lr * update.lr_factor,
                update.weight_decay,
                settings.eps * update.eps_factor if has_eps else None,
            )
        )
    return roles


def summarize_role_settings(config: Config) -> dict[str, Any]:
    """Return the settings of each role, and the multipliers of the model, as JSON."""
    model = config.model
    return {
        "parametrization": model.parametrization.name.value,
        "roles": [asdict(one) for one in list_role_settings(config)],
        "attention_scale": compute_attention_scale(model),
        "residual_multiplier": compute_residual_multiplier(model),
        "output_multiplier": compute_output_multiplier(model),
    }


def format_role_settings(config: Config) -> list[str]:
    """Return a table of the settings of each role, and a line with the multipliers."""
    model = config.model
    rows = [
        [
            one.role,
            format_count(one.num_parameters),
            _format_std(one.init_std),
            format_short(one.lr),
            format_short(one.weight_decay),
            "-" if one.eps is None else format_short(one.eps),
        ]
        for one in list_role_settings(config)
    ]
    multipliers = (
        f"parametrization {model.parametrization.name.value}: attention scale "
        f"{format_short(compute_attention_scale(model))}, residual multiplier "
        f"{format_short(compute_residual_multiplier(model))}, output multiplier "
        f"{format_short(compute_output_multiplier(model))}"
    )
    return [*format_table(_HEADERS, rows), "", multipliers]


def _format_std(init_std: tuple[float, float] | None) -> str:
    if init_std is None:
        return "-"
    low, high = map(format_short, init_std)
    return low if low == high else f"{low} to {high}"
