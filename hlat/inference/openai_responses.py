"""Answers in the format of OpenAI's completions and chat completions API."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hlat.inference.server_generation import TextPart, TokenScore


@dataclass(frozen=True)
class Usage:
    """Number of tokens of a request; a prompt of several texts counts once."""

    num_prompt_tokens: int
    num_completion_tokens: int

    def to_json(self) -> dict[str, int]:
        """Return the object `usage`."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }


class ResponseFormat:
    """JSON of the answers to one request."""

    def __init__(self, model: str, is_chat: bool, has_scores: bool) -> None:
        self.is_chat, self._has_scores = is_chat, has_scores
        prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def encode_response(
        self, completions: Sequence[tuple[list[TextPart], str]], usage: Usage
    ) -> bytes:
        """Return the response to a request without `stream`, from parts and finish reasons.

        The encoder does not release the GIL, and therefore encodes one choice at a time.
        """
        choices = []
        for index, (parts, finish_reason) in enumerate(completions):
            text = "".join(part.text for part in parts)
            message = {"message": {"role": "assistant", "content": text}}
            content = message if self.is_chat else {"text": text}
            scores = [score for part in parts for score in part.scores]
            choices.append(_encode(self._build_choice(index, content, scores, finish_reason)))
        head = _encode(self._head | {"usage": usage.to_json()}).removesuffix("}")
        return f'{head}, "choices": [{", ".join(choices)}]}}'.encode()

    def build_role_chunk(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a message."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return self._build_chunk([self._build_choice(index, delta, (), None)])

    def build_chunk(self, index: int, part: TextPart) -> dict[str, Any]:
        """Return the chunk of a part of a text."""
        content = {"delta": {"content": part.text}} if self.is_chat else {"text": part.text}
        return self._build_chunk([self._build_choice(index, content, part.scores, None)])

    def build_finish_chunk(self, index: int, finish_reason: str) -> dict[str, Any]:
        """Return the last chunk of a text."""
        content: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._build_chunk([self._build_choice(index, content, (), finish_reason)])

    def build_usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk of a request, with the number of tokens."""
        return self._build_chunk([]) | {"usage": usage.to_json()}

    def _build_chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = {"object": "chat.completion.chunk"} if self.is_chat else {}
        return self._head | kind | {"choices": choices}

    def _build_choice(
        self,
        index: int,
        content: dict[str, Any],
        scores: Sequence[TokenScore],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        log_probs = None
        if self._has_scores and scores:
            log_probs = _build_chat_scores(scores) if self.is_chat else _build_scores(scores)
        return {"index": index, **content, "logprobs": log_probs, "finish_reason": finish_reason}


def format_event(data: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {_encode(data)}\n\n"


def _encode(data: dict[str, Any]) -> str:
    """Return JSON; raise ValueError for numbers that are not finite, which JSON does not have."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def _build_scores(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Return the object `logprobs` of the completions API."""
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.log_prob for score in scores],
        "top_logprobs": [_build_top_scores(score) for score in scores],
        "text_offset": [score.offset for score in scores],
    }


def _build_top_scores(score: TokenScore) -> dict[str, float] | None:
    """Return the most likely tokens and the token itself; of two with the same name, the first."""
    if score.log_prob is None:
        return None
    top: dict[str, float] = {}
    for name, log_prob in (*score.top_log_probs, (score.name, score.log_prob)):
        top.setdefault(name, log_prob)
    return top


def _build_chat_scores(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Return the object `logprobs` of the chat API."""
    content = [
        _build_chat_token(score.name, score.log_prob)
        | {"top_logprobs": [_build_chat_token(*top) for top in score.top_log_probs]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _build_chat_token(name: str, log_prob: float | None) -> dict[str, Any]:
    is_text = not name.startswith("token_id:")
    return {
        "token": name,
        "logprob": log_prob,
        "bytes": list(name.encode()) if is_text else None,
    }
