"""State of one text that the server generates: its sequence in the batch, its parts and scores."""

from dataclasses import dataclass, field
from functools import cache

from hlat.data.token_decoder import TokenDecoder
from hlat.inference.decode_batch import DecodeSequence, ScoredToken
from hlat.inference.sampling_settings import SamplingSettings
from hlat.inference.text_generator import TextGenerator
from hlat.inference.text_stream import TextStream


@dataclass(frozen=True)
class GenerationRequest:
    """Prompt of one text, and how to generate it.

    Attributes:
        prompt: Token ids.
        settings: Settings of generation.
        sample_id: Index of the text among those of the same prompt and seed.
        num_top: Number of most likely tokens in the scores; None: no log-probabilities.
        echo: The text begins with that of the prompt.
    """

    prompt: list[int]
    settings: SamplingSettings
    sample_id: int = 0
    num_top: int | None = None
    echo: bool = False


@dataclass(frozen=True)
class TokenScore:
    """Log-probabilities of a token in nats.

    Attributes:
        text: Text that the token adds, with the characters that it completes. Concatenated, these
            are the text.
        offset: Position of `text` in the text.
        name: Text of the token by itself, or `token_id:N`.
        log_prob: None for the first token of a text.
        top_log_probs: Name and log-probability of the most likely tokens.
    """

    text: str
    offset: int
    name: str
    log_prob: float | None
    top_log_probs: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TextPart:
    """Next part of a text, and the scores of the tokens since the last part."""

    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Finish:
    """End of a text; `reason` is `stop`, or `length` at the limit of tokens."""

    reason: str
    num_tokens: int


class TokenNames:
    """Texts of single tokens."""

    def __init__(self, generator: TextGenerator) -> None:
        self._tokenizer = generator.tokenizer
        # Decoders of some tokenizers remove the space before the first token
        self._first = self._tokenizer.encode("a", is_prompt_start=False)[:1]
        self.get = cache(self._name_token)

    def _name_token(self, token: int) -> str:
        """Return the text of a token, or `token_id:N` for a part of a character."""
        decode = self._tokenizer.decode
        text = decode([*self._first, token], skip_special_tokens=False)
        text = text[len(decode(self._first)) :]
        return f"token_id:{token}" if not text or "\ufffd" in text else text


@dataclass(eq=False)
class Generation:
    """Text of a request while it is generated.

    Attributes:
        sequence: Sequence in the batch.
        parts: Parts and, at last, the end, which were not yet sent.
    """

    request: GenerationRequest
    generator: TextGenerator
    names: TokenNames
    parts: list[TextPart | Finish] = field(default_factory=list)

    def __post_init__(self) -> None:
        request, tokenizer = self.request, self.generator.tokenizer
        settings, room = request.settings, self.generator.context_length - len(request.prompt)
        self.sequence = DecodeSequence(
            request.prompt,
            min(settings.max_tokens, room),
            settings.temperature,
            settings.top_p,
            settings.seed,
            request.sample_id,
            request.num_top,
            score_prompt=request.echo,
        )
        self._stream = TextStream(tokenizer, request.prompt, settings.stop)
        self._decoder = TokenDecoder(tokenizer, () if request.echo else request.prompt)
        self._num_characters = 0

    @property
    def is_finished(self) -> bool:
        """True after the last token."""
        return self._stream.is_finished or len(self.sequence.tokens) == self.sequence.max_tokens

    def start(self, prompt_scores: list[ScoredToken], first: ScoredToken | None) -> None:
        """Add the prompt, if requested, and the first token, which is None if there is none."""
        if self.request.echo:
            self.parts.append(self._build_prompt(prompt_scores, is_last=first is None))
        if first is None:
            self.parts.append(Finish("length", 0))
        else:
            self.append(first)

    def _build_prompt(self, scored: list[ScoredToken], is_last: bool) -> TextPart:
        tokens = scored or [ScoredToken(token) for token in self.request.prompt]
        scores = [self._score(token, is_last=False) for token in tokens[:-1]]
        scores.append(self._score(tokens[-1], is_last))
        text = "".join(score.text for score in scores)
        return TextPart(text, tuple(scores) if scored else ())

    def append(self, token: ScoredToken) -> None:
        """Add a token."""
        text = self._stream.append(token.token)
        if self.is_finished:
            text += self._stream.flush()
        scores = () if self.request.num_top is None else (self._score(token, self.is_finished),)
        if text or scores:
            self.parts.append(TextPart(text, scores))
        if self.is_finished:
            reason = "stop" if self._stream.is_finished else "length"
            self.parts.append(Finish(reason, len(self.sequence.tokens)))

    def _score(self, token: ScoredToken, is_last: bool) -> TokenScore:
        text, offset = self._decoder.append(token.token), self._num_characters
        if is_last:
            text += self._decoder.flush()
        self._num_characters += len(text)
        top = tuple((self.names.get(one), value) for one, value in token.top_log_probs.items())
        return TokenScore(text, offset, self.names.get(token.token), token.log_prob, top)
