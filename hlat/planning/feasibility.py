"""Whether a configuration that obeys every rule can also run: does it fit, does the SDK know it."""

from pathlib import Path

from hlat import compiler
from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.config.run import Config
from hlat.planning.memory import device_memory, estimate


def refuse_infeasible(config: Config) -> None:
    """Return if the configuration can run.

    Raises:
        ConfigError: Every reason why it cannot, one line each.
    """
    problems = [*compiler.problems(config.compiler), *_memory(config), *_origin(config)]
    if problems:
        raise ConfigError(*problems)


def check_vocabulary(model: Model, tokenizer_size: int) -> None:
    """Return if every token id has a row in the embedding.

    Raises:
        ConfigError: The tokenizer has more ids than the model has rows.
    """
    if tokenizer_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the {tokenizer_size} ids of "
            f"data.tokenizer; use model.vocab_size={-(-tokenizer_size // 64) * 64}"
        )


def _memory(config: Config) -> list[str]:
    need, have = estimate(config), device_memory(config)
    if need.total <= have or config.run.force:
        return []
    terms = ", ".join(f"{name} {_gib(size)}" for name, size in vars(need).items() if size)
    return [
        f"model={config.model.name} needs {_gib(need.total)} GiB per device ({terms}), "
        f"hardware={config.hardware.name} has {_gib(have)}; use a smaller model, a narrower "
        "precision, more parallelism.tp or pp, or a smaller batch.micro_batch_size; python -m "
        "hlat.plan with the same overrides tells what fits, and run.force=true goes on"
    ]


def _origin(config: Config) -> list[str]:
    """Why the run cannot begin from model.init_from; one that has saved never looks there again."""
    if config.model.init_from is None:
        return []
    assert config.run.name is not None, "resolve names every run"
    from hlat.checkpoint import places, pretrained  # its library may be missing on a login node

    destination = config.checkpoint.destination
    try:
        home = places.home(Path(config.run.root) / config.run.name, destination)
        if places.steps(home / "checkpoints"):
            return []
        pretrained.check(config.model.init_from, config.model)
    except ConfigError as error:
        return list(error.problems)
    except OSError as error:
        return list(places.unusable(f"checkpoint.destination={destination}", error).problems)
    return []


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"
