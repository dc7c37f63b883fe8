"""The limit of an eager step: its matmuls, torch's attention, and the bytes of all other classes.

It computes each matmul of hlat's step in the fastest layout of its factors, and attention by the
operator of eager layers, since another one would change their losses. Other classes move their
bytes (step_limits.py) at the bandwidth of a stream test. Nothing is trained.
"""

# ruff: noqa: N812

from contextlib import closing

import torch
import torch.nn.functional as F
from account import record_step
from contestants import Settings
from step_limits import MatmulTimes, Stream, count_bytes, count_matmuls

from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.decoder_spec import count_parameters
from hlat.precision.torch_dtypes import TORCH_DTYPES


class LimitStep:
    """Contestant that computes what a step computes at least."""

    def __init__(self, settings: Settings) -> None:
        config = settings.config
        self.num_parameters = count_parameters(config.model)
        with closing(NativeEngine()) as engine:
            engine.build(config)
            sequences = PackedSequences(settings.tokens())
            engine.train_step(sequences, 1e-4)
            counts = count_matmuls(record_step(engine, sequences))
            self.num_bytes = sum(count_bytes(engine, config).values())
        dtype = TORCH_DTYPES[config.precision.compute_dtype]
        times = MatmulTimes(dtype, settings.device, counts)
        self.matmuls = [(times.fastest[size], count) for size, count in counts.items()]
        self.attention = AttentionLayers(config, settings.device)
        self.stream = Stream(settings.device)

    def step(self) -> None:
        for matmul, count in self.matmuls:
            for _ in range(count):
                matmul()
        self.attention.run()
        self.stream.move(self.num_bytes)

    def loss(self) -> None:
        return None


class AttentionLayers:
    """Both passes of torch's attention, with the strides of hlat.model.attention."""

    def __init__(self, config: Config, device: str) -> None:
        model, batch = config.model, config.batch
        dtype = TORCH_DTYPES[config.precision.compute_dtype]
        num_heads, num_groups = model.num_attention_heads, model.num_key_value_heads
        self.num_layers, self.is_gqa = model.num_layers, num_groups < num_heads
        self.q, self.k, self.v, self.grad = (
            torch.randn(
                config.micro_batch_size,
                batch.sequence_length,
                size,
                model.head_dim,
                dtype=dtype,
                device=device,
            ).transpose(1, 2)
            for size in (num_heads, num_groups, num_groups, num_heads)
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.num_micro_batches = batch.global_batch_size // config.micro_batch_size

    def run(self) -> None:
        """Compute attention and its gradients in all layers."""
        for _ in range(self.num_layers * self.num_micro_batches):
            y = F.scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=True, enable_gqa=self.is_gqa
            )
            torch.autograd.grad(y, (self.q, self.k, self.v), self.grad)


def open_trainer(settings: Settings) -> LimitStep:
    """Measure the fastest layouts of the matmuls of the step."""
    return LimitStep(settings)
