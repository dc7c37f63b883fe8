"""Feasibility of a valid configuration: SDK, memory and initial weights."""

from dataclasses import replace
from pathlib import Path

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.model import ModelConfig
from hlat.config.run import Config
from hlat.engine.neuron import neuron_environment
from hlat.plan.memory_estimate import estimate_memory, get_device_memory_bytes


def validate_feasibility(config: Config) -> None:
    """Raise ConfigError with all reasons if the configuration cannot run."""
    problems = [
        *neuron_environment.find_compiler_problems(config.compiler),
        *_find_memory_problems(config),
        *_find_init_from_problems(config),
    ]
    raise_config_errors(problems)


def validate_vocab_size(model: ModelConfig, tokenizer_size: int) -> None:
    """Raise ConfigError if the tokenizer has more ids than model.vocab_size."""
    if tokenizer_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the {tokenizer_size} ids of "
            f"data.tokenizer; use model.vocab_size={-(-tokenizer_size // 64) * 64}"
        )


def _find_memory_problems(config: Config) -> list[str]:
    required, available = estimate_memory(config), get_device_memory_bytes(config)
    if required.total <= available or config.run.force:
        return []
    terms = ", ".join(
        f"{name} {_format_gib(size)}" for name, size in vars(required).items() if size
    )
    return [
        f"model={config.model.name} needs {_format_gib(required.total)} GiB per device ({terms}), "
        f"hardware={config.hardware.name} has {_format_gib(available)}; use "
        f"{_find_excessive_setting(config, available)}, a narrower precision, or more "
        "parallelism.tp or pp; hlat plan with the same overrides lists what fits; run.force=true "
        "skips this check"
    ]


def _find_excessive_setting(config: Config, available: float) -> str:
    """Return the setting to reduce for a run that needs more memory than a device has."""
    batch = config.batch
    single = estimate_memory(replace(config, batch=replace(batch, micro_batch_size=1)))
    if single.total <= available:
        return f"a smaller batch.micro_batch_size than {config.micro_batch_size}"
    if single.total - single.activations - single.logits - single.working <= available:
        return f"a smaller batch.sequence_length than {batch.sequence_length}"
    return "a smaller model"


def _find_init_from_problems(config: Config) -> list[str]:
    """Return problems of model.init_from, unless the run resumes from its own checkpoint."""
    if config.model.init_from is None:
        return []
    assert config.run.name is not None, "resolve names every run"
    # safetensors may be missing on a login node
    from hlat.checkpoint import checkpoint_directory
    from hlat.checkpoint.hugging_face import pretrained_weights
    from hlat.storage import storage_path

    destination = config.checkpoint.destination
    try:
        root = checkpoint_directory.build_checkpoint_root(
            Path(config.run.root) / config.run.name, destination
        )
        if checkpoint_directory.list_steps(root / "checkpoints"):
            return []
        pretrained_weights.validate_pretrained(config.model.init_from, config.model)
    except ConfigError as error:
        return list(error.problems)
    except OSError as error:
        return list(
            storage_path.build_unusable_error(
                f"checkpoint.destination={destination}", error
            ).problems
        )
    return []


def _format_gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"
