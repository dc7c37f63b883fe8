"""Conversation with a model on a terminal.

With a chat template, the model answers in a conversation. Without one, as for a model that was only
pre-trained, it continues each line.
"""

import contextlib
import sys
from collections.abc import Callable

from hlat.config.config_errors import ConfigError, escape_control_characters
from hlat.inference.sampling_settings import SamplingSettings
from hlat.inference.text_generator import TextGenerator

_HELP = "/reset starts again, Ctrl-C stops the model, Ctrl-D ends."
_NO_TEMPLATE = (
    "The model has no chat template: it continues each line that you type. An empty line continues "
    "the last text."
)


def print_text(text: str) -> None:
    """Print a part of a generated text, with control characters escaped on a terminal."""
    sys.stdout.write(escape_control_characters(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Chat:
    """Conversation, or last text of a model without a chat template."""

    def __init__(self, generator: TextGenerator, settings: SamplingSettings) -> None:
        self._generator, self._settings = generator, settings
        self._has_template = generator.chat_format.template is not None
        self._num_turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def answer(self, line: str, on_text: Callable[[str], None]) -> None:
        """Generate the answer to a line, or its continuation; Ctrl-C ends the text early.

        Raise ConfigError if the line fills the context, which then remains as it was.
        """
        prompt = self._encode(line)
        parts: list[str] = []

        def collect(text: str) -> None:
            parts.append(text)
            on_text(text)

        with contextlib.suppress(KeyboardInterrupt):
            self._generator.stream(prompt, self._settings, collect, sample_id=self._num_turns)
        self._num_turns += 1
        if self._has_template:
            answer = {"role": "assistant", "content": "".join(parts)}
            self._messages += [{"role": "user", "content": line}, answer]
        else:
            self._text = (line or self._text) + "".join(parts)

    def _encode(self, line: str) -> list[int]:
        """Return the prompt; the oldest turns are omitted if the context is too short for them."""
        if not self._has_template:
            return self._generator.encode(line or self._text)
        while True:
            try:
                return self._generator.encode_chat(
                    [*self._messages, {"role": "user", "content": line}]
                )
            except ConfigError:
                if not self._messages:
                    raise
                self._messages = self._messages[2:]


def run_chat(
    generator: TextGenerator,
    settings: SamplingSettings,
    read_line: Callable[[str], str] = input,
) -> None:
    """Answer lines of the terminal until its end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  editing and history of lines
    chat = Chat(generator, settings)
    print(_HELP if generator.chat_format.template else f"{_NO_TEMPLATE} {_HELP}")
    while True:
        try:
            line = read_line("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip() == "/reset":
            chat.reset()
            continue
        try:
            chat.answer(line, print_text)
        except ConfigError as error:
            print(f"hlat: {error}", file=sys.stderr)
        print()
