"""Plain PyTorch training loop for the models of the peers."""

from collections.abc import Callable

import torch
from contestants import Settings
from torch import Tensor, nn

from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.weight_initialization import compute_initial_values

LossFunction = Callable[[Tensor], Tensor]
IGNORE_INDEX = -100


class PlainLoop:
    """Forward, backward, clip_grad_norm_, fused AdamW, zero_grad.

    Recipe `mixed` is autocast: weights in fp32, matmuls in bf16.
    """

    def __init__(self, settings: Settings, model: nn.Module, compute_loss: LossFunction) -> None:
        self.config = settings.config
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.tokens = torch.from_numpy(settings.tokens()).long().to(settings.device)
        self.parameters = list(model.parameters())
        self.compute_loss = compute_loss
        self.autocast = torch.autocast(
            settings.device.partition(":")[0], torch.bfloat16, enabled=settings.recipe == "mixed"
        )
        optimizer = self.config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        with self.autocast:
            loss = self.compute_loss(self.tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.last = loss.detach()

    def loss(self) -> float:
        return self.last.item()


def weights_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype of the weights."""
    return torch.bfloat16 if settings.recipe == "bf16" else torch.float32


def load_initial_weights(settings: Settings) -> dict[str, Tensor]:
    """Return the initial values of hlat by their names in the state_dict of transformers."""
    config = settings.config
    return {
        spec.name: torch.from_numpy(
            compute_initial_values(
                spec, config.model, config.run.seed, (0,) * len(spec.shape), spec.shape
            )
        ).to(settings.device, weights_dtype(settings))
        for spec in list_parameter_specs(config.model)
    }


def next_tokens(tokens: Tensor) -> Tensor:
    """Return the target of each position, `IGNORE_INDEX` for the last one."""
    return nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
