"""Configuration of NxD that corresponds to the configuration of a run."""

from typing import Any

import neuronx_distributed as nxd
from neuronx_distributed.parallel_layers import mappings

from hlat.config.run import Config
from hlat.distributed.pipeline_stages import assign_layers_to_stages
from hlat.engine.nxd.nxd_layers import (
    NxdCrossEntropy,
    NxdDecoderLayer,
    NxdRMSNorm,
    select_checkpointed_modules,
)


def build_nxd_config(config: Config) -> dict[str, Any]:
    """Return the argument of NxD's functions that build the model and the optimizer.

    The engine clips gradients itself.
    """
    layout, precision = config.parallelism, config.precision
    nxd_config: dict[str, Any] = nxd.neuronx_distributed_config(
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_config=_build_pipeline_config(config) if layout.pp > 1 else None,
        optimizer_config={"zero_one_enabled": layout.zero > 0, "grad_clipping": False},
        activation_checkpoint_config=select_checkpointed_modules(config),
        model_init_config={"meta_device_init": True, "param_init_fn": lambda *_: None},
        mixed_precision_config={
            "use_master_weights": precision.master_weight_dtype is not None,
            "use_fp32_grad_acc": precision.grad_accum_dtype is not precision.grad_dtype,
        },
    )
    return nxd_config


def _build_pipeline_config(config: Config) -> dict[str, Any]:
    """Return the settings of a 1F1B pipeline with the stages of the planner."""
    stages = assign_layers_to_stages(config.model.num_layers, config.parallelism.pp)
    return {
        "transformer_layer_cls": NxdDecoderLayer,
        "num_microbatches": config.num_micro_batches,
        "output_loss_value_spec": True,
        "input_names": ["tokens", "targets", "weights"],
        "pipeline_cuts": [f"model.layers.{layers[-1]}" for layers in stages[:-1]],
        "leaf_module_cls": [NxdRMSNorm.__name__, NxdCrossEntropy.__name__],
        "autowrap_modules": [mappings],
        "use_zero1_optimizer": config.parallelism.zero > 0,
        "use_optimizer_wrapper": True,
        "return_loss_on_cpu": False,
    }
