"""Text generation with a model: for one prompt as a stream, or for many prompts in batches.

The decoding loop is in decoding_loop.py. A text ends at a stop string, at a token that ends a
document or message, after `max_tokens` tokens, or at the end of the context.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.distributed import heartbeat
from hlat.engine.engine_factory import create_engine
from hlat.inference.chat_format import ChatFormat, load_chat_format
from hlat.inference.decode_batch import DecodeBatch
from hlat.inference.inference_model import InferenceModel, build_stop_check
from hlat.inference.model_source import ModelSource
from hlat.inference.sampling_settings import SamplingSettings
from hlat.inference.text_stream import TextStream


class PromptTooLongError(ConfigError):
    """A prompt that fills the context."""


@dataclass(frozen=True)
class Completion:
    """Generated text; `finish_reason` is `stop`, or `length` at the limit of tokens."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int


class TextGenerator:
    """Model for text generation, with its tokenizer and chat format.

    All ranks call each method with the same arguments.
    """

    def __init__(self, model: InferenceModel, source: ModelSource) -> None:
        self.model, self.tokenizer = model, source.tokenizer
        self.context_length = source.sequence_length
        self.chat_format: ChatFormat = load_chat_format(source)

    def create_batch(self) -> DecodeBatch:
        """Return an empty batch of sequences that join and leave it at any time."""
        return self.model.create_batch()

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt; of an empty one, the token that precedes a document.

        Raise PromptTooLongError if they fill the context.
        """
        self._validate_characters(prompt)
        return self._validate_length(
            self.tokenizer.encode(prompt) or [self.tokenizer.prefix_token_id]
        )

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of messages with `role` and `content`, in the chat format.

        Raise PromptTooLongError if they fill the context, or ConfigError if the chat template
        rejects them.
        """
        if self.chat_format.template is None:
            return self.encode("\n\n".join(message["content"] for message in messages))
        text = self.chat_format.render(messages)
        self._validate_characters(text)
        return self._validate_length(self.tokenizer.encode_with_special_tokens(text))

    def stream(
        self,
        prompt: list[int],
        settings: SamplingSettings,
        on_text: Callable[[str], None],
        sample_id: int = 0,
    ) -> Completion:
        """Generate the text of one prompt and call `on_text` with each part of it.

        `sample_id` selects other random numbers of the same seed.
        """
        stream = self._create_stream(prompt, settings)

        def is_finished(ids: list[int]) -> bool:
            if text := stream.append(ids[-1]):
                on_text(text)
            return stream.is_finished

        max_tokens = min(settings.max_tokens, self.context_length - len(prompt))
        [ids] = self.model.generate(
            [prompt],
            max_tokens,
            is_finished=is_finished,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            sample_ids=[sample_id],
        )
        if text := stream.flush():
            on_text(text)
        return _build_completion(stream, prompt, ids)

    def generate(
        self, prompts: Sequence[list[int]], settings: SamplingSettings, first_sample_id: int = 0
    ) -> list[Completion]:
        """Generate the texts of prompts; `first_sample_id` is the sample id of the first."""
        generated = self.model.generate(
            prompts,
            min(settings.max_tokens, self.context_length - min(map(len, prompts))),
            is_finished=build_stop_check(self.tokenizer, settings.stop),
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            sample_ids=range(first_sample_id, first_sample_id + len(prompts)),
        )
        completions = []
        for prompt, ids in zip(prompts, generated, strict=True):
            stream = self._create_stream(prompt, settings)
            shown = ids[: self.context_length - len(prompt)]
            for token in shown:
                stream.append(token)
                if stream.is_finished:
                    break
            stream.flush()
            completions.append(_build_completion(stream, prompt, shown))
        return completions

    def _create_stream(self, prompt: list[int], settings: SamplingSettings) -> TextStream:
        return TextStream(self.tokenizer, prompt, settings.stop)

    def _validate_length(self, ids: list[int]) -> list[int]:
        """Return token ids; raise PromptTooLongError if they fill the context."""
        if len(ids) >= self.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, and the context of the model "
                f"{self.context_length}; use a prompt of at most {self.context_length - 1} tokens"
            )
        return ids

    def _validate_characters(self, text: str) -> None:
        """Raise PromptTooLongError for a text that fills the context with any of its encodings."""
        limit = self.context_length * self.tokenizer.max_token_characters
        if len(text) > limit:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, and the context of the model "
                f"{self.context_length} tokens; use a prompt of at most {limit} characters"
            )


@contextmanager
def open_text_generator(source: ModelSource, config: Config) -> Iterator[TextGenerator]:
    """Load the weights of a model into the engine of `config`, and return its generator."""
    with closing(create_engine(config)) as engine:
        engine.build(config, training=False, initialize=False)
        heartbeat.record_start()
        source.load_weights(engine.state_shards())
        yield TextGenerator(InferenceModel(engine), source)


def _build_completion(stream: TextStream, prompt: list[int], ids: list[int]) -> Completion:
    reason = "stop" if stream.is_finished else "length"
    return Completion(stream.text, reason, len(prompt), len(ids))
