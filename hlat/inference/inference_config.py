"""Configuration of an engine for inference.

Checkpoints are independent of the layout, so that a model is evaluated on any hardware with
enough memory. Of the training recipe only the settings of the forward pass are used.
"""

from collections.abc import Sequence

from hlat.config.compose import compose_config
from hlat.config.model_overrides import format_override
from hlat.config.precision import Dtype
from hlat.config.resolve import convert_to_dataclasses, resolve_config
from hlat.config.run import Config
from hlat.config.run_identity import INITIAL_WEIGHTS_DEFAULTS, flatten_model
from hlat.inference.model_metadata import ModelMetadata
from hlat.tracking.run_directory import EVALUATIONS_DIR

OVERRIDABLE_GROUPS = ("hardware", "parallelism", "engine", "compiler", "precision")
"""Config groups that the user may override; the model determines all others."""
_PRECISION_RECIPES = {Dtype.fp32: "fp32", Dtype.bf16: "bf16"}


def build_inference_config(metadata: ModelMetadata, overrides: Sequence[str]) -> Config:
    """Return the configuration of an engine; raise ConfigError if an override does not fit.

    The overrides are of `OVERRIDABLE_GROUPS`.
    """
    all_overrides = ["recovery=interactive", *_build_model_overrides(metadata), *overrides]
    if not any(override.startswith("precision=") for override in overrides):
        operators = metadata.fp32_operators if metadata.dtype is Dtype.bf16 else ()
        recipe = f"precision={_PRECISION_RECIPES[metadata.dtype]}"
        all_overrides[1:1] = [recipe, f"precision.fp32_operators=[{','.join(operators)}]"]
    composed = compose_config(all_overrides)
    config = convert_to_dataclasses(composed)
    layout = config.parallelism
    num_replicas = max(1, config.num_processes // max(1, layout.tp * layout.pp))
    # Only for the validation: batches of an evaluation have other sizes
    composed.batch.global_batch_size = num_replicas * layout.pp
    composed.batch.micro_batch_size = 1
    return resolve_config(composed)


def build_unverified_config(overrides: Sequence[str]) -> Config:
    """Return a configuration without the model; the job validates that the model fits."""
    name = f"run.name={EVALUATIONS_DIR}"
    return convert_to_dataclasses(compose_config(["recovery=interactive", name, *overrides]))


def parse_config_group(override: str) -> str:
    """Return the config group of an override."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]


def _build_model_overrides(metadata: ModelMetadata) -> list[str]:
    omitted = ("model.name", *INITIAL_WEIGHTS_DEFAULTS)
    root = str(metadata.base_dir).replace("\\", "\\\\").replace('"', '\\"')
    return [
        *(
            format_override(key, value)  # not those of a preset, which also selects a layout
            for key, value in flatten_model(metadata.model).items()
            if key not in omitted
        ),
        f"batch.sequence_length={metadata.sequence_length}",
        f'run.root="{root}"',
        f"run.name={EVALUATIONS_DIR}",
    ]
