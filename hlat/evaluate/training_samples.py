"""Texts that a model in training writes after fixed prompts, for reading its progress.

The random numbers are a function of run.seed and the prompt's index, so that the texts of two
evaluations differ by the weights only. Generation changes no state of the training.
"""

from dataclasses import dataclass

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.data.token_decoder import decode_continuation
from hlat.data.tokenizer import Tokenizer
from hlat.engine.interface import Engine
from hlat.inference.inference_model import InferenceModel


@dataclass(frozen=True)
class SamplePrompts:
    """Prompts of `evaluation.samples` with their token ids."""

    texts: list[str]
    ids: list[list[int]]
    tokenizer: Tokenizer
    max_tokens: int
    temperature: float
    seed: int


def load_sample_prompts(config: Config) -> SamplePrompts | None:
    """Return the prompts; None if there are none. Raise ConfigError if one is too long."""
    settings, data = config.evaluation.samples, config.data
    if not settings.prompts:
        return None
    tokenizer = Tokenizer(
        *(data.tokenizer, data.root, data.eos_token),
        bos_token=data.bos_token,
        max_lost_text=data.max_lost_text,
    )
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    encoded = [ids.tolist() for ids in tokenizer.encode_chunks(settings.prompts)]
    ids = [[*bos, *one] or [tokenizer.eos_token_id] for one in encoded]
    longest, length = max(map(len, ids)), config.batch.sequence_length
    if longest + settings.max_tokens > length:
        raise ConfigError(
            f"evaluation.samples.max_tokens={settings.max_tokens} and a prompt of {longest} tokens "
            f"exceed batch.sequence_length={length}; use shorter prompts or fewer tokens"
        )
    return SamplePrompts(
        settings.prompts,
        ids,
        tokenizer,
        settings.max_tokens,
        settings.temperature,
        config.run.seed,
    )


def generate_samples(engine: Engine, prompts: SamplePrompts) -> list[dict[str, str]]:
    """Return `prompt` and generated `text` of each prompt; all ranks call it."""
    tokenizer, eos = prompts.tokenizer, prompts.tokenizer.eos_token_id
    generated = InferenceModel(engine).generate(
        prompts.ids,
        prompts.max_tokens,
        is_finished=lambda ids: ids[-1] == eos,
        temperature=prompts.temperature,
        seed=prompts.seed,
    )
    samples = []
    for text, prompt, ids in zip(prompts.texts, prompts.ids, generated, strict=True):
        tokens = ids[:-1] if ids[-1] == eos else ids
        continuation = decode_continuation(tokenizer, prompt, tokens)
        samples.append({"prompt": text, "text": continuation})
    return samples
