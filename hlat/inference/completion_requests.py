"""Validation of requests of OpenAI's completions and chat completions API.

Settings that are not implemented are errors unless their value has no effect
(platform.openai.com/docs/api-reference/completions and /chat; settings of other servers are those
of docs.vllm.ai).
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hlat.inference.sampling_settings import MAX_STOP_CHARACTERS, SamplingSettings

_MAX_STOP_STRINGS, _MAX_COMPLETIONS, _MAX_TOP_LOG_PROBS = 16, 128, 20
_MAX_SHOWN_CHARACTERS = 100
_COMMON_KEYS = {
    *("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"),
    *("n", "logprobs", "stream", "stream_options"),
}
_COMPLETION_KEYS = _COMMON_KEYS | {"prompt", "echo"}
_CHAT_KEYS = _COMMON_KEYS | {"messages", "top_logprobs"}
_IGNORED_KEYS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "parallel_tool_calls",
}
"""Settings of OpenAI's service that have no effect on the text."""
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values without effect, besides null, of settings that are not implemented."""
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}


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
    """Valid request: prompts, or the messages of a chat, and how to generate and send completions.

    Attributes:
        prompts: Texts or token ids.
        num_samples: Number of completions of each prompt.
        num_top: Number of most likely tokens in the scores; None: no log-probabilities.
    """

    prompts: list[str | list[int]]
    messages: list[dict[str, str]]
    settings: SamplingSettings
    num_samples: int
    num_top: int | None
    echo: bool
    stream: bool
    include_usage: bool


def parse_json_body(body: bytes) -> Any:
    """Return the value of a JSON body; raise RequestError unless it consists of valid Unicode."""
    try:
        text = body.decode()
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the body contains an unpaired surrogate, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error})") from error
    return value


def parse_request(
    body: Any, model: str, is_chat: bool, context_length: int, vocab_size: int
) -> CompletionRequest:
    """Return the request of a JSON body; raise RequestError if it is invalid.

    Args:
        body: Value of the body.
        model: Name of the model of this server.
        is_chat: True for a request of the chat API.
        context_length: Number of tokens of the context, which limits prompts of token ids.
        vocab_size: Exclusive upper bound of token ids.
    """
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    if (requested := body.get("model") or model) != model:
        message = f"the model {_show(requested)} does not exist; this server has {model!r}"
        raise RequestError(message, "model", 404, "model_not_found")
    _validate_keys(body, _CHAT_KEYS if is_chat else _COMPLETION_KEYS)
    echo = not is_chat and _get(body, "echo", _is_bool, "true or false", False)
    num_samples = _get(body, "n", _is_in(1, _MAX_COMPLETIONS), f"1 to {_MAX_COMPLETIONS}", 1)
    messages = _parse_messages(body) if is_chat else []
    prompts = [] if is_chat else _parse_prompts(body, num_samples, context_length, vocab_size)
    return CompletionRequest(
        prompts=prompts,
        messages=messages,
        settings=_parse_settings(body, echo),
        num_samples=num_samples,
        num_top=_parse_num_top(body, is_chat),
        echo=echo,
        stream=_get(body, "stream", _is_bool, "true or false", False),
        include_usage=_parse_include_usage(body),
    )


def _validate_keys(body: Mapping[str, Any], supported: set[str]) -> None:
    """Raise RequestError for a setting that is not implemented and may have an effect."""
    for key, value in body.items():
        if key in supported or key in _IGNORED_KEYS or value is None:
            continue
        if value not in _NEUTRAL_VALUES.get(key, ()):
            raise RequestError(
                f"{key[:_MAX_SHOWN_CHARACTERS]}={_show(value)} is not supported", key
            )


def _parse_settings(body: Mapping[str, Any], echo: bool) -> SamplingSettings:
    default, least = SamplingSettings(), 0 if echo else 1
    max_tokens = [
        _get(body, key, _is_in(least, 2**31), f"a whole number of {least} or more", None)
        for key in ("max_tokens", "max_completion_tokens")
    ]
    given = [value for value in max_tokens if value is not None]
    if len({*given}) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    temperature = _get(body, "temperature", _is_temperature, "a number from 0 to 2", None)
    top_p = _get(body, "top_p", _is_probability, "a number above 0 and up to 1", None)
    return SamplingSettings(
        max_tokens=given[0] if given else default.max_tokens,
        temperature=default.temperature if temperature is None else float(temperature),
        top_p=default.top_p if top_p is None else float(top_p),
        seed=_get(body, "seed", _is_int, "a whole number", secrets.randbits(63)),
        stop=_parse_stop(body),
    )


def _parse_num_top(body: Mapping[str, Any], is_chat: bool) -> int | None:
    """Return the number of most likely tokens; None without log-probabilities."""
    is_count, count = (
        _is_in(0, _MAX_TOP_LOG_PROBS),
        f"a whole number from 0 to {_MAX_TOP_LOG_PROBS}",
    )
    if not is_chat:
        num_top = body.get("logprobs")
        return None if num_top is False else _get(body, "logprobs", is_count, count, None)
    num_top = _get(body, "top_logprobs", is_count, count, None)
    if not _get(body, "logprobs", _is_bool, "true or false", False):
        if num_top:
            raise RequestError(f"top_logprobs={num_top} needs logprobs=true", "top_logprobs")
        return None
    return num_top or 0


def _parse_include_usage(body: Mapping[str, Any]) -> bool:
    options = _get(body, "stream_options", _is_dict, "an object", {})
    if unknown := sorted(options.keys() - _STREAM_OPTIONS):
        raise RequestError(f"stream_options.{_show(unknown[0])} is not supported", "stream_options")
    return bool(_get(options, "include_usage", _is_bool, "true or false", False))


def _parse_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise RequestError("stop is not a text or a list of texts", "stop")
    if len(stop) > _MAX_STOP_STRINGS:
        raise RequestError(f"stop has more than {_MAX_STOP_STRINGS} texts", "stop")
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_CHARACTERS:
        message = f"stop has a text of {longest} characters; use at most {MAX_STOP_CHARACTERS}"
        raise RequestError(message, "stop")
    return tuple(stop)


def _parse_prompts(
    body: Mapping[str, Any], num_samples: int, context_length: int, vocab_size: int
) -> list[str | list[int]]:
    prompt = body.get("prompt", "")
    is_one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str | list)
    )
    prompts = [prompt] if is_one else prompt
    if not isinstance(prompts, list) or not all(isinstance(one, str | list) for one in prompts):
        raise RequestError("prompt is no text, list of token ids, or list of these", "prompt")
    num_completions = len(prompts) * num_samples
    if not 1 <= num_completions <= _MAX_COMPLETIONS:
        message = (
            f"{len(prompts)} prompts with n={num_samples} are {num_completions} completions; use"
        )
        raise RequestError(f"{message} 1 to {_MAX_COMPLETIONS}", "prompt")
    for one in prompts:
        if isinstance(one, list):
            _validate_token_ids(one, context_length, vocab_size)
    return prompts


def _validate_token_ids(ids: list[Any], context_length: int, vocab_size: int) -> None:
    if len(ids) >= context_length:
        message = f"the prompt has {len(ids)} tokens, and the context of the model {context_length}"
        raise RequestError(message, "prompt", code="context_length_exceeded")
    if not ids:
        raise RequestError("prompt is an empty list of token ids", "prompt")
    if wrong := [one for one in ids if not (_is_int(one) and 0 <= one < vocab_size)]:
        message = f"prompt has {_show(wrong[0])}, which is no token id; use 0 to {vocab_size - 1}"
        raise RequestError(message, "prompt")


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


def _get(
    body: Mapping[str, Any], key: str, is_valid: Callable[[Any], bool], expected: str, default: Any
) -> Any:
    """Return a value of the body, or the default for null; raise RequestError if it is invalid."""
    value = body.get(key)
    if value is None:
        return default
    if not is_valid(value):
        raise RequestError(f"{key}={_show(value)} is not {expected}", key)
    return value


def _show(value: Any) -> str:
    """Return the representation of a value, of limited length."""
    text = repr(value)
    is_long = len(text) > _MAX_SHOWN_CHARACTERS
    return f"{text[:_MAX_SHOWN_CHARACTERS]}..." if is_long else text


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_in(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_temperature(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 2


def _is_probability(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1
