"""Whether gradients grow over a short run as they do for a twin that computes in fp64."""

import numpy as np
import torch

from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.diagnosis import reference
from hlat.diagnosis.patient import Patient, batch, lively
from hlat.diagnosis.verdict import Culprit, Outcome, judged

_STEPS = 12
_MOST_RATE = 1e-3
_WITHIN = {Dtype.fp32: 1e-3, Dtype.bf16: 0.05}
"""Of the twin's norm, at the worst step; by the dtype of products."""


def check_numerics(patient: Patient) -> list[Outcome]:
    """The norm of the gradients at each step, beside the twin's."""
    config = patient.config
    rate = min(config.optimizer.lr, _MOST_RATE)
    patient.fill(lively(config))
    patient.forget()
    found = [patient.train(batch(config, seed), rate).grad_norm for seed in range(_STEPS)]
    if not patient.leads:
        return []
    twin = _twin(config, rate)
    ratios = np.array(found, np.float64) / twin
    worst, tolerance = float(np.abs(ratios - 1).max()), _WITHIN[config.precision.compute]
    growth = float(ratios[-1] / ratios[0])
    return [
        judged(
            "numerics",
            [] if worst <= tolerance else [Culprit("grad_norm", "precision")],
            f"over {_STEPS} steps the gradient norm is its fp64 twin's to {worst:.1e}",
            f"over {_STEPS} steps the gradient norm leaves its fp64 twin's by {worst:.1%} (at most "
            f"{tolerance:.1%}) and grows {growth:.3g} times as much",
            largest=worst,
            growth=growth,
            tolerance=tolerance,
        )
    ]


def _twin(config: Config, rate: float) -> list[float]:
    """Norms of the gradients of a textbook's run."""
    settings = config.optimizer
    leaves = {
        name: torch.from_numpy(weight).double().requires_grad_()
        for name, weight in lively(config).items()
    }
    groups = [
        {"params": [leaf], "weight_decay": settings.weight_decay if decays else 0.0}
        for leaf in leaves.values()
        for decays in (settings.decay_norms or leaf.dim() > 1,)
    ]
    betas = (settings.beta1, settings.beta2)
    adamw = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=settings.eps)
    norms = []
    for seed in range(_STEPS):
        tokens = batch(config, seed)
        counted = tokens.shape[0] * (tokens.shape[1] - 1)
        adamw.zero_grad()
        loss = reference.summed_loss(config.model, leaves, tokens) / counted
        loss.backward()
        most = settings.grad_clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(leaves.values(), most)))
        adamw.step()
    return norms
