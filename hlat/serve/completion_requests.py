"""Validation of requests of OpenAI's completions and chat completions API.

Settings that change the text and are not implemented are rejected; others, such as `user`, are
ignored (platform.openai.com/docs/api-reference/completions and /chat).
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hlat.generate.text_generator import SamplingSettings

_MAX_STOP_STRINGS, _MAX_PROMPTS = 16, 64
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values, besides null, of settings that are not implemented."""


class RequestError(Exception):
    """An invalid request, with the parameter and the HTTP status."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def to_json(self) -> dict[str, Any]:
        """Return the error in the format of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class CompletionRequest:
    """Valid request: prompts, or the messages of a chat, and how to generate and send the text."""

    prompts: list[str]
    messages: list[dict[str, str]]
    settings: SamplingSettings
    stream: bool
    include_usage: bool


def parse_request(body: Any, model: str, is_chat: bool, context_length: int) -> CompletionRequest:
    """Return the request of a JSON body; raise RequestError if it is invalid."""
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    if (requested := body.get("model", model)) != model:
        message = f"the model {requested!r} does not exist; this server has {model!r}"
        raise RequestError(message, "model", 404, "model_not_found")
    for key, neutral in _NEUTRAL_VALUES.items():
        if (value := body.get(key)) is not None and value not in neutral:
            raise RequestError(f"{key}={value!r} is not supported", key)
    max_tokens_key = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    default_tokens = context_length if is_chat else 16  # as OpenAI's
    settings = SamplingSettings(
        max_tokens=_get(
            body, max_tokens_key, _is_positive_int, "a whole number above 0", default_tokens
        ),
        temperature=float(_get(body, "temperature", _is_in(0, 2), "a number from 0 to 2", 1)),
        top_p=float(_get(body, "top_p", _is_in(1e-6, 1), "a number above 0 and up to 1", 1)),
        seed=_get(body, "seed", _is_int, "a whole number", secrets.randbits(63)),
        stop=_parse_stop(body),
    )
    stream = _get(body, "stream", _is_bool, "true or false", False)
    options = _get(body, "stream_options", _is_dict, "an object", {})
    messages = _parse_messages(body) if is_chat else []
    prompts = [] if is_chat else _parse_prompts(body)
    return CompletionRequest(
        prompts, messages, settings, stream, bool(options.get("include_usage"))
    )


def _get(
    body: Mapping[str, Any], key: str, is_valid: Callable[[Any], bool], expected: str, default: Any
) -> Any:
    """Return a value of the body, or the default for null; raise RequestError if it is invalid."""
    value = body.get(key)
    if value is None:
        return default
    if not is_valid(value):
        raise RequestError(f"{key}={value!r} is not {expected}", key)
    return value


def _parse_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise RequestError("stop is not a text or a list of texts", "stop")
    if len(stop) > _MAX_STOP_STRINGS:
        raise RequestError(f"stop has more than {_MAX_STOP_STRINGS} texts", "stop")
    return tuple(stop)


def _parse_prompts(body: Mapping[str, Any]) -> list[str]:
    prompt = body.get("prompt", "")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
        raise RequestError("prompt is not a text or a list of texts", "prompt")
    if not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} texts; use 1 to {_MAX_PROMPTS}", "prompt")
    return prompts


def _parse_messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is not a list of at least one message", "messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _parse_message(message: Any, param: str) -> dict[str, str]:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):  # parts; other types, such as images, are rejected
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if is_text else None
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise RequestError(f"{param} has no texts `role` and `content`", param)
    return {"role": message["role"], "content": content}


def _is_positive_int(value: Any) -> bool:
    return _is_int(value) and 0 < value < 2**31


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_in(low: float, high: float) -> Callable[[Any], bool]:
    def is_valid(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high

    return is_valid
