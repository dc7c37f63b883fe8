"""Settings of generation: one set of names and defaults for Python, the commands and the server."""

import math
from dataclasses import dataclass

from hlat.config.config_errors import ConfigError

MAX_STOP_CHARACTERS = 1000
"""Maximum length of a stop string."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of generation.

    Attributes:
        max_tokens: Maximum number of generated tokens, at most up to the end of the context.
        temperature: Divisor of the logits; 0 selects the most likely token.
        top_p: Sample from the most likely tokens with this total probability.
        seed: Seed of the random numbers.
        stop: Texts that end the generation.

    Raises:
        ConfigError: A value is out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens={self.max_tokens} is not a whole number of 0 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature} is not a number of 0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is not a number above 0 and up to 1")
        for stop in self.stop:
            if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise ConfigError(
                    f"stop: a text has {len(stop)} characters; use 1 to {MAX_STOP_CHARACTERS}"
                )
