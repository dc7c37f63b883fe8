"""Trains with neuronx-distributed: on Trainium, or with the same code on a CPU in its tests."""

from collections.abc import Iterator
from typing import Any, NoReturn

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import mappings, parallel_state
from torch import Tensor, nn

from hlat import optimizer
from hlat.checkpoint.chunk import Chunk
from hlat.config.errors import ConfigError
from hlat.config.precision import Dtype, Rounding
from hlat.config.run import Config
from hlat.data.sequences import Sequences, counted_targets
from hlat.engine import copies
from hlat.engine.dtypes import DTYPES
from hlat.engine.examination import Machinery, examine
from hlat.engine.interface import Disagreement, Examination, Numbers, World
from hlat.engine.nxd.adamw import AdamW
from hlat.engine.nxd.dtypes import torch_dtypes
from hlat.engine.nxd.layers import Decoder, Norm, Trained, recomputed
from hlat.engine.nxd.start import check_device
from hlat.engine.nxd.weights import MOMENTS, Weights, hold
from hlat.engine.nxd.world import device_axes, host_axes, world_of
from hlat.model.canonical import parameters
from hlat.model.canonical_views import views
from hlat.model.initialise import initial_values
from hlat.model.loss import IGNORED, next_token_targets
from hlat.parallelism.plan import stage_layers

_EPSILON = 1e-6
"""Added to the norm that gradients are clipped by, as torch and NxD do."""


class NxdEngine:
    """The engine of hlat.engine.interface."""

    world = World()
    device = ""

    def examine(self, config: Config) -> Examination:
        """Join the other processes; compute and add up what is known before memory is taken."""
        self._join(config)
        dtype = self._dtypes[config.precision.compute]
        device = Machinery(self._device, dtype, device_axes(), torch_xla.sync, pairwise=False)
        return examine(config, device)

    def build(self, config: Config, trains: bool = True) -> None:
        """Join the other processes; make this one's part of the model, with its optimizer.

        Raises:
            ConfigError: It is not to train, and reads nothing.
        """
        if not trains:
            self.texts()
        self._join(config)
        self._parameters = {parameter.name: parameter for parameter in parameters(config.model)}
        self._model = nxd.initialize_parallel_model(self._settings, self._make)
        self.weights = self._make_weights()
        self._host: dict[str, dict[str, Tensor]] = {}
        self._versions: dict[tuple[str, str], int] = {}
        self._num_skipped = torch.zeros((), dtype=torch.int32, device=self._device)
        self._initialise()

    def train_step(self, sequences: Sequences, learning_rate: float) -> dict[str, Tensor]:
        """Run one optimizer step over all micro batches; nothing waits for the device."""
        self._refresh()
        loss = self._backward(sequences)
        self.weights.adamw.set_rate(learning_rate)
        self.weights.optimizer.step()
        self.weights.optimizer.zero_grad(set_to_none=True)
        if self._equalises:
            self.weights.equalise()
        self._sum_loss(loss)
        loss /= self.world.dp_size
        torch_xla.sync()
        return {"loss": loss, "grad_norm": self._grad_norm}

    def _backward(self, sequences: Sequences) -> Tensor:
        """Add up gradients over all micro batches; returns their loss where the head is, else 0."""
        batch = self._batch(sequences)
        if self.config.parallelism.pp > 1:  # NxD cuts it, and takes the mean over micro batches
            batch["weights"] *= self.config.num_micro_batches
            loss = self._model.run_train(**batch)
            return self._zero() if loss is None else loss.detach().to(self._device)
        loss = self._zero()
        for start in range(0, len(sequences.tokens), self.config.micro_batch_size):
            some = slice(start, start + self.config.micro_batch_size)
            micro = {name: tensor[some] for name, tensor in batch.items()}
            loss += self._model.run_train(**self._on_device(micro)).detach()
            torch_xla.sync()
        return loss

    @torch.no_grad()
    def eval_step(self, sequences: Sequences) -> dict[str, Tensor]:
        """Measure the mean loss of some sequences, the same on every rank.

        They are filled up with ones that do not count, so that their graph is one for all numbers.
        """
        self._refresh()
        config, dp = self.config, self.world.dp_size
        pipeline = config.parallelism.pp > 1
        size = config.batch.global_batch_size // dp if pipeline else config.micro_batch_size
        batch = _filled_up(self._batch(sequences, shared=False), size * dp)
        loss = self._zero()
        for start in range(self.world.dp_rank * size, len(batch["tokens"]), dp * size):
            part = {name: tensor[start : start + size] for name, tensor in batch.items()}
            loss += self._evaluated_by_stages(part) if pipeline else self._evaluated(part)
            torch_xla.sync()
        self._sum_loss(loss)
        torch_xla.sync()
        return {"loss": loss}

    def texts(self) -> NoReturn:
        """Refuse: a graph would be compiled for every length.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "engine.name=nxd reads no texts, because each of their lengths would be compiled; use "
            "engine=native, which loads the same checkpoints, on Trainium 2, a GPU or a CPU"
        )

    def read(self, pending: dict[str, Tensor]) -> Numbers:
        """Wait for the device and fetch the numbers; all ranks do so together."""
        if "grad_norm" not in pending:
            return Numbers(pending["loss"].item())
        held = self.weights.held.items()
        param_norm = self.weights.norm({name: weight.updated.detach() for name, weight in held})
        numbers = torch.stack([pending["loss"], pending["grad_norm"], param_norm]).tolist()
        loss, *norms = numbers
        return Numbers(loss, norms[0], norms[1], int(self._num_skipped))

    def peak_memory(self) -> int | None:
        """Not known: PyTorch/XLA counts no memory of such a device."""
        return None

    def chunks(self) -> Iterator[Chunk]:
        """Weights, both moments, and the count of updates of what this rank updates.

        They lie in host memory; what is written there is on the device when the next step begins.
        """
        if not self._host:
            torch_xla.sync()  # or each tensor would have a graph of its own
            self._host = {name: self._fetched(name) for name in self.weights.held}
            self._versions = _versions(self._host)
        for name, kinds in self._host.items():
            for kind in ("weights", *MOMENTS):
                yield from self._chunks(kind, name, kinds[kind])
            for chunk in self._chunks("updates", name, kinds["weights"]):
                first = chunk.saved and not any(chunk.offset)
                yield Chunk(chunk.name, (), (), (), kinds["step"], first)

    def compare_copies(self) -> list[Disagreement]:
        """What of the state data-parallel or tensor-parallel ranks hold, and not alike.

        Where tensor-parallel copies may drift apart, those of data-parallel ranks are compared.
        """
        axes = [self._host_axes["dp"]]
        if not self.config.precision.copies_drift:
            axes.append(self._host_axes["tp"])
        return copies.compare(self.chunks(), axes)

    def close(self) -> None:
        """Release the model and its optimizer, and leave the other processes."""
        for name in ("_model", "weights"):
            vars(self).pop(name, None)
        self.world.everyone.any(False)  # waits for all
        dist.destroy_process_group()

    def _join(self, config: Config) -> None:
        """Find the device and meet the other processes, unless that was done before.

        Raises:
            ConfigError: The device does not do what the recipe leaves to it.
        """
        if self.device:
            return
        check_device(config)
        self.config, self._dtypes = config, torch_dtypes(config.compiler, config.precision)
        stochastic = config.precision.rounding is Rounding.stochastic
        self._equalises = stochastic and not config.precision.copies_drift
        if not dist.is_initialized():
            dist.init_process_group("xla", init_method="xla://")
        self._settings = self._nxd_config()
        self._host_axes = host_axes()
        self.world = world_of(self._host_axes)
        self._device = xm.xla_device()
        self.device = str(self._device)

    def _fetched(self, name: str) -> dict[str, Tensor]:
        """What is kept of a parameter, in host memory and in the dtypes of its checkpoints."""
        precision = self.config.precision
        weights = DTYPES[precision.master_weights or precision.weights]
        moments = DTYPES[precision.optimizer_state]
        dtypes = {"weights": weights, **dict.fromkeys(MOMENTS, moments), "step": torch.float32}
        return {
            kind: tensor.to("cpu", copy=True).to(dtypes[kind])
            for kind, tensor in self.weights.state(name).items()
        }

    def _evaluated(self, part: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self._model(**self._on_device(part))
        return loss

    def _evaluated_by_stages(self, part: dict[str, Tensor]) -> Tensor:
        """The loss where the head is, else 0."""
        weights = part["weights"] * self.config.num_micro_batches
        loss = self._model.run_eval(**part | {"weights": weights})
        return self._zero() if loss is None else loss.to(self._device)

    def _sum_loss(self, loss: Tensor) -> None:
        """Over data-parallel ranks, and to all stages."""
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())

    def _on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in batch.items()}

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=self._dtypes[Dtype.fp32], device=self._device)

    def _make(self) -> nn.Module:
        with torch.device("meta"):
            trained = Trained(self.config)
        self._shapes = trained.shapes
        return trained

    def _nxd_config(self) -> dict[str, Any]:
        layout, precision = self.config.parallelism, self.config.precision
        wide = precision.accumulation is not precision.gradients
        settings: dict[str, Any] = nxd.neuronx_distributed_config(
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp,
            sequence_parallel=layout.sequence_parallel,
            pipeline_config=self._pipeline() if layout.pp > 1 else None,
            optimizer_config={"zero_one_enabled": layout.zero > 0, "grad_clipping": False},
            activation_checkpoint_config=recomputed(self.config),
            model_init_config={"meta_device_init": True, "param_init_fn": lambda *_: None},
            mixed_precision_config={
                "use_master_weights": precision.master_weights is not None,
                "use_fp32_grad_acc": wide,
            },
        )
        return settings

    def _pipeline(self) -> dict[str, Any]:
        """Stages as the plan cuts them, run one forward, one backward."""
        config = self.config
        stages = stage_layers(config.model.num_layers, config.parallelism.pp)
        return {
            "transformer_layer_cls": Decoder,
            "num_microbatches": config.num_micro_batches,
            "output_loss_value_spec": True,
            "input_names": ["tokens", "targets", "weights"],
            "pipeline_cuts": [f"model.layers.{layers[-1]}" for layers in stages[:-1]],
            "leaf_module_cls": [Norm.__name__],
            "autowrap_modules": [mappings],
            "use_zero1_optimizer": config.parallelism.zero > 0,
            "use_optimizer_wrapper": True,
            "return_loss_on_cpu": False,
        }

    def _named(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in llama.Llama."""
        return {
            name.removeprefix("module.").removeprefix("model."): parameter
            for name, parameter in self._model.named_parameters()
        }

    def _make_weights(self) -> Weights:
        named = self._named()
        config, zero = self.config, self.config.parallelism.zero > 0
        wide, state = self._dtypes[Dtype.fp32], self._dtypes[config.precision.optimizer_state]
        made = nxd.initialize_parallel_optimizer(
            self._settings,
            AdamW,
            optimizer.groups(config.optimizer, named.values()),
            **optimizer.settings(config.optimizer),
            dtype=wide,
            prepare=self._clip,
            **({"optimizer_dtype": state} if zero else {}),
        )
        return Weights(named, hold(config, named, self._shapes), made, zero, wide)

    def _clip(self, groups: list[dict[str, Any]]) -> Tensor:
        """Clip all gradients by their norm; returns whether it is finite."""
        gradients = self.weights.gradients()
        self._grad_norm = self.weights.norm(gradients)
        limit = self.config.optimizer.grad_clip
        if limit:
            factor = (limit / (self._grad_norm + _EPSILON)).clamp(max=1.0)
            for gradient in gradients.values():
                gradient.mul_(factor)
        finite = torch.isfinite(self._grad_norm)
        self._num_skipped += ~finite
        return finite

    @torch.no_grad()
    def _initialise(self) -> None:
        for chunk in self.chunks():
            kind, _, name = chunk.name.partition("/")
            if kind == "weights":
                values = initial_values(
                    self._parameters[name],
                    self.config.model,
                    self.config.run.seed,
                    chunk.offset,
                    chunk.size,
                )
                chunk.tensor.copy_(torch.from_numpy(values).view(chunk.tensor.shape))

    @torch.no_grad()
    def _refresh(self) -> None:
        """Put what was written in host memory on the device; let what the model reads follow."""
        now, written = _versions(self._host), set()
        for (name, kind), version in self._versions.items():
            if now[name, kind] != version:
                tensor = self.weights.state(name)[kind]
                tensor.copy_(self._host[name][kind].to(tensor.dtype))
                written.add(kind)
        self._host, self._versions = {}, {}
        if self.config.parallelism.zero and "weights" in written:
            for weight in self.weights.held.values():  # it asks for gradients of what has changed
                weight.parameter.grad = torch.zeros_like(weight.parameter)
            self.weights.optimizer.optimizer.allgather_weights_and_update_full_parameter()
            self.weights.optimizer.zero_grad(set_to_none=True)

    def _batch(self, sequences: Sequences, shared: bool = True) -> dict[str, Tensor]:
        """Tokens, targets and the weight of each position's loss, in host memory.

        Args:
            sequences: With what counts in them.
            shared: Whether they are this data-parallel rank's only, of whose losses NxD takes the
                mean over those ranks; else all ranks have them all.
        """
        loss_mask, tokens = self.config.data.loss_mask, torch.from_numpy(sequences.tokens)
        documents = torch.from_numpy(sequences.documents) if loss_mask else None
        targets = next_token_targets(tokens, documents)
        if sequences.num_counted is not None:
            targets[:, sequences.num_counted :] = IGNORED
        number = torch.tensor(int(counted_targets(sequences, loss_mask).sum()))
        share = 1
        if shared and loss_mask:
            self._host_axes["dp"].sum_(number)
            share = self.world.dp_size
        weights = (targets != IGNORED).to(self._dtypes[Dtype.fp32]) * share / max(1, int(number))
        return {"tokens": tokens, "targets": targets.clamp(min=0), "weights": weights}

    def _chunks(self, kind: str, name: str, tensor: Tensor) -> Iterator[Chunk]:
        shard = self.weights.held[name].shard
        counts = self.config.parallelism.zero > 0 or self.world.dp_rank == 0
        for rows, view, begin in views(shard.rows, tensor):
            across = () if shard.columns is None else (shard.columns,)
            offset = (rows.first, *(first for first, _ in across))
            size = (rows.count, *(count for _, count in across))
            shape = self._parameters[rows.name].shape
            yield Chunk(
                f"{kind}/{rows.name}", shape, offset, size, view, counts and begin < shard.num_owned
            )


def _filled_up(batch: dict[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """A multiple of so many sequences: what is missing is the first, and counts nothing."""
    missing = -len(batch["tokens"]) % multiple
    filled = {name: torch.cat([part, part[:1].expand(missing, -1)]) for name, part in batch.items()}
    filled["weights"][len(batch["weights"]) :] = 0
    return filled


def _versions(host: dict[str, dict[str, Tensor]]) -> dict[tuple[str, str], int]:
    """How often torch has written each tensor."""
    return {(name, kind): t._version for name, kinds in host.items() for kind, t in kinds.items()}
