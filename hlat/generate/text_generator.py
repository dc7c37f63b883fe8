"""Generated text of a model: of one prompt as it appears, or of many prompts in batches.

A text ends at a stop string, at a token that ends a document or message, after `max_tokens` tokens,
or at the end of the context.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.data.prompt_tokenizer import PromptTokenizer
from hlat.engine.engine_factory import create_engine
from hlat.evaluate.chat_format import ChatFormat, load_chat_format
from hlat.evaluate.inference_model import InferenceModel, build_stop_check
from hlat.evaluate.model_source import ModelSource

_NUM_CONTEXT_TOKENS = 6
"""Tokens of the prompt that are decoded with the generated ones: the decoders of some tokenizers
remove the space before the first token."""
_INCOMPLETE_CHARACTER = "\ufffd"
"""Decoded text of some bytes of a character."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of generation; temperature 0 selects the most likely token."""

    max_tokens: int = 256
    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """Generated text; `finish_reason` is `stop`, or `length` at the limit of tokens."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int


class TextStream:
    """Text of a growing sequence of tokens, up to the first stop string or end token.

    Attributes:
        text: Text so far, without bytes of an incomplete character and a possible beginning of a
            stop string at its end.
        is_finished: True after a stop string or end token.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
    ) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._context = list(prompt[-_NUM_CONTEXT_TOKENS:])
        self._context_length = len(tokenizer.decode(self._context))
        self.text, self.is_finished, self._decoded = "", False, ""

    def append(self, ids: list[int]) -> str:
        """Return the new part of the text, given all generated tokens."""
        is_end = ids[-1] in self._tokenizer.end_token_ids
        tokens = ids[:-1] if is_end else ids
        self._decoded = self._tokenizer.decode([*self._context, *tokens])[self._context_length :]
        positions = [self._decoded.find(stop, len(self.text)) for stop in self._stop]
        if found := [position for position in positions if position >= 0]:
            self.is_finished, self._decoded = True, self._decoded[: min(found)]
        if is_end or self.is_finished:
            self.is_finished = True
            return self.flush()
        return self._extend(len(self._decoded) - self._count_unfinished_characters())

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        return self._extend(len(self._decoded))

    def _extend(self, end: int) -> str:
        new = self._decoded[len(self.text) : end]
        self.text += new
        return new

    def _count_unfinished_characters(self) -> int:
        """Return the number of characters at the end that later tokens may change or remove."""
        text = self._decoded
        num_incomplete = len(text) - len(text.rstrip(_INCOMPLETE_CHARACTER))
        sizes = range(max(map(len, self._stop), default=1) - 1, 0, -1)
        partial = (size for size in sizes if any(s.startswith(text[-size:]) for s in self._stop))
        return max(num_incomplete, next(partial, 0))


class TextGenerator:
    """Model for text generation, with its tokenizer and chat format.

    All ranks call each method with the same arguments.
    """

    def __init__(self, model: InferenceModel, source: ModelSource) -> None:
        self.model, self.tokenizer = model, source.tokenizer
        self.context_length = source.sequence_length
        self.chat_format: ChatFormat = load_chat_format(source)

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt; of an empty one, the token that precedes a document.

        Raise ConfigError if they fill the context.
        """
        return self._validate_length(
            self.tokenizer.encode(prompt) or [self.tokenizer.prefix_token_id]
        )

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of messages with `role` and `content`, in the chat format.

        Raise ConfigError if they fill the context, or the chat template rejects them.
        """
        if self.chat_format.template is None:
            return self.encode("\n\n".join(message["content"] for message in messages))
        text = self.chat_format.render(messages)
        return self._validate_length(self.tokenizer.encode_with_special_tokens(text))

    def stream(
        self,
        prompt: list[int],
        settings: SamplingSettings,
        on_text: Callable[[str], None],
        is_cancelled: Callable[[], bool] = lambda: False,
        sample_id: int = 0,
    ) -> Completion:
        """Generate the text of one prompt and call `on_text` with each part of it.

        `sample_id` selects other random numbers of the same seed. `is_cancelled` may end the
        generation in a single process.
        """
        stream = self._create_stream(prompt, settings)

        def is_finished(ids: list[int]) -> bool:
            if text := stream.append(ids):
                on_text(text)
            return stream.is_finished or is_cancelled()

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
            stream, shown = self._create_stream(prompt, settings), ids[: self._get_room(prompt)]
            stream.append(shown)
            stream.flush()
            completions.append(_build_completion(stream, prompt, shown))
        return completions

    def _create_stream(self, prompt: list[int], settings: SamplingSettings) -> TextStream:
        return TextStream(self.tokenizer, prompt, settings.stop)

    def _get_room(self, prompt: list[int]) -> int:
        return self.context_length - len(prompt)

    def _validate_length(self, ids: list[int]) -> list[int]:
        if len(ids) >= self.context_length:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, and the context of the model "
                f"{self.context_length}; use a prompt of at most {self.context_length - 1} tokens"
            )
        return ids


@contextmanager
def open_text_generator(source: ModelSource, config: Config) -> Iterator[TextGenerator]:
    """Load the weights of a model into the engine of `config`, and return its generator."""
    with closing(create_engine(config)) as engine:
        engine.build(config, training=False, initialize=False)
        source.load_weights(engine.chunks())
        yield TextGenerator(InferenceModel(engine), source)


def _build_completion(stream: TextStream, prompt: list[int], ids: list[int]) -> Completion:
    reason = "stop" if stream.is_finished else "length"
    return Completion(stream.text, reason, len(prompt), len(ids))
