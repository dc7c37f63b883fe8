"""The conversation on a terminal, with a generator that repeats its prompt."""

from typing import Any

import pytest

from hlat.config.config_errors import ConfigError
from hlat.inference.chat_format import ChatFormat
from hlat.inference.chat_loop import run_chat
from hlat.inference.text_generator import SamplingSettings


class FakeGenerator:
    """Generator with words as tokens and a context of 8 tokens."""

    def __init__(self, template: str | None) -> None:
        self.chat_format = ChatFormat(template)
        self.prompts: list[list[str]] = []

    def encode(self, prompt: str) -> list[str]:
        if len(prompt.split()) > 8:
            raise ConfigError("the prompt is too long")
        return prompt.split()

    def encode_chat(self, messages: list[dict[str, str]]) -> list[str]:
        return self.encode(" ".join(message["content"] for message in messages))

    def stream(self, prompt: list[str], settings: Any, on_text: Any, sample_id: int) -> None:
        self.prompts.append(prompt)
        on_text(f" re:{prompt[-1]}")
        if prompt[-1] == "slow":
            raise KeyboardInterrupt
        on_text(f"#{sample_id}")


def chat(generator: FakeGenerator, *lines: str) -> None:
    typed = iter(lines)

    def read_line(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    run_chat(generator, SamplingSettings(), read_line)


def test_a_conversation_contains_earlier_turns_until_it_is_reset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generator = FakeGenerator("template")
    chat(generator, "one", "two", "/reset", "three")
    assert generator.prompts == [["one"], ["one", "re:one#0", "two"], ["three"]]
    assert " re:two#1\n" in capsys.readouterr().out


def test_ctrl_c_ends_the_answer_only() -> None:
    generator = FakeGenerator("template")
    chat(generator, "slow", "next")
    assert generator.prompts[1] == ["slow", "re:slow", "next"]


def test_oldest_turns_of_a_long_conversation_are_removed() -> None:
    generator = FakeGenerator("template")
    chat(generator, "a b c", "d e f", "g")
    assert generator.prompts[2] == ["d", "e", "f", "re:f#1", "g"]


def test_a_line_that_is_too_long_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    generator = FakeGenerator("template")
    chat(generator, "a b c d e f g h i", "j")
    assert generator.prompts == [["j"]]
    assert "hlat: the prompt is too long" in capsys.readouterr().err


def test_lines_are_continued_without_a_template(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generator = FakeGenerator(None)
    chat(generator, "one", "two", "")
    assert generator.prompts == [["one"], ["two"], ["two", "re:two#1"]]
    assert "no chat template" in capsys.readouterr().out
