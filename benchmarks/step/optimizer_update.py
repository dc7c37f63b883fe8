"""Measure the nanoseconds per weight of the updates of hlat's optimizers and of other packages.

Usage: python benchmarks/step/optimizer_update.py [--shape small] [--rounds 5]

All contestants run in one process on one thread, each with separate fp32 weights in the shapes of a
model, and alternate. Gradients are random and constant. An interval is ten updates, of which SOAP
computes its eigenbases in one. The metric is wall time; ratios are computed within a round.
Packages that are not installed are omitted.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contestants import make_settings
from torch import Tensor, nn

from benchmarks.common import describe_machine, spread
from hlat.config.components import list_components
from hlat.config.compose import compose_config
from hlat.config.model import ModelConfig
from hlat.config.resolve import resolve_config
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.model.decoder_spec import count_parameters, list_parameter_specs
from hlat.model.parameter_spec import ParameterRole

HERE = Path(__file__).resolve().parent
LIBRARIES = ["torch", "pytorch-optimizer", "schedulefree"]
UPDATES = 10
"""Updates of an interval."""
RATE = 1e-5
REFERENCE = "ours, adamw"
Step = Callable[[], Any]


def make_ours(shape: str, optimizer: str) -> Step:
    """Return the update of the native engine in fp32."""
    overrides = make_settings("ours", shape, "fp32", "cpu").overrides
    config = resolve_config(
        compose_config([*overrides, f"optimizer={optimizer}", "schedule=constant"])
    )
    engine = NativeEngine()
    engine.build(config)
    engine.init_weights()
    params = engine.params
    assert isinstance(params, TrainableParameters)
    gradients = {name: make_gradient(one) for name, one in params.optimizer_params.items()}
    skip = torch.zeros((), dtype=torch.bool)

    def step() -> None:
        for name, gradient in gradients.items():
            params.optimizer_params[name].grad = gradient
        params.step(RATE, skip)

    return step


def make_gradient(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape).mul(1e-3)


def make_weights(model: ModelConfig) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of decoder layers, and the other weights, with gradients."""
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for spec in list_parameter_specs(model):
        weight = nn.Parameter(torch.randn(spec.shape) / 50)
        weight.grad = make_gradient(weight)
        is_matrix = spec.role in (ParameterRole.matrix, ParameterRole.residual)
        (matrices if is_matrix else others).append(weight)
    return matrices, others


def make_torch_muon(model: ModelConfig) -> Step:
    """Return the update of torch.optim.Muon, and of AdamW for the other weights."""
    matrices, others = make_weights(model)
    muon = torch.optim.Muon(matrices, lr=RATE, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=RATE, fused=True)
    return lambda: (muon.step(), adamw.step())


def make_with_adamw(model: ModelConfig, build: Callable[[list[nn.Parameter]], Any]) -> Step:
    """Return the update of matrices by a package, and of the other weights by AdamW.

    The package receives copies of the gradients, as some overwrite them.
    """
    matrices, others = make_weights(model)
    optimizer, adamw = build(matrices), torch.optim.AdamW(others, lr=RATE, fused=True)
    gradients = [weight.grad for weight in matrices]

    def step() -> None:
        for weight, gradient in zip(matrices, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        adamw.step()

    return step


def open_packages(model: ModelConfig) -> dict[str, Step]:
    """Return the updates of other packages by their names in the table."""
    weights = [weight for each in make_weights(model) for weight in each]
    steps = {
        "torch, AdamW, fused": torch.optim.AdamW(weights, lr=RATE, fused=True).step,
        "torch, Muon": make_torch_muon(model),
    }
    if importlib.util.find_spec("pytorch_optimizer"):
        import pytorch_optimizer as package

        weights = [weight for each in make_weights(model) for weight in each]
        steps["pytorch_optimizer, Lion"] = package.Lion(weights, lr=RATE).step
        steps["pytorch_optimizer, NorMuon"] = make_with_adamw(
            model,
            lambda params: package.NorMuon([{"params": params, "use_muon": True}], lr=RATE),
        )
        steps["pytorch_optimizer, SOAP"] = make_with_adamw(
            model, lambda params: package.SOAP(params, lr=RATE)
        )
    if importlib.util.find_spec("schedulefree"):
        import schedulefree

        weights = [weight for each in make_weights(model) for weight in each]
        optimizer = schedulefree.AdamWScheduleFree(weights, lr=RATE)
        optimizer.train()
        steps["schedulefree, AdamW"] = optimizer.step
    return steps


def open_contestants(shape: str) -> dict[str, Step]:
    """Return the update of each contestant by its name in the table."""
    model = make_settings("ours", shape, "fp32", "cpu").config.model
    names = [component.kind for component in list_components("optimizer")]
    presets = {name: "adamw_small" if name == "adamw" else name for name in names}
    ours = {f"ours, {name}": make_ours(shape, preset) for name, preset in presets.items()}
    return ours | open_packages(model)


def seconds(step: Step, updates: int) -> float:
    """Return the mean time of a call."""
    start = time.perf_counter()
    for _ in range(updates):
        step()
    return (time.perf_counter() - start) / updates


def measure(shape: str, num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contestant."""
    torch.set_num_threads(1)
    count = count_parameters(make_settings("ours", shape, "fp32", "cpu").config.model)
    steps = open_contestants(shape)
    first = {name: seconds(step, 1) for name, step in steps.items()}
    rounds = [
        {name: seconds(step, UPDATES) for name, step in steps.items()} for _ in range(num_rounds)
    ]
    reference = statistics.median(times[REFERENCE] for times in rounds)
    print(f"{REFERENCE}: {reference / count * 1e9:.2f} ns per weight")
    return [
        {
            "contestant": name,
            "threads": 1,
            "parameters": count,
            "first_step_seconds": round(first[name], 3),
            "nanoseconds_per_parameter": spread([times[name] / count * 1e9 for times in rounds]),
            "ratio": spread([times[name] / times[REFERENCE] for times in rounds]),
        }
        for name in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="small", help="tiny, small, or a preset of conf/model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "optimizer_update.json")
    arguments = parser.parse_args()
    libraries = [name for name in LIBRARIES if importlib.util.find_spec(name.replace("-", "_"))]
    result = {
        "rows": measure(arguments.shape, arguments.rounds),
        "machine": describe_machine(libraries),
        "protocol": {"rounds": arguments.rounds, "shape": arguments.shape, "updates": UPDATES},
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
