"""Chat template of a model in Hugging Face format, or of a run that continues one.

A template is a program of another author. It is rendered in Jinja's immutable sandbox, as in
transformers, so that it can access the messages and special tokens only.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hlat.checkpoint.pretrained_files import PretrainedFiles
from hlat.config.config_errors import ConfigError
from hlat.evaluate.model_source import ModelSource

_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Keys of tokenizer_config.json that templates use."""


@dataclass(frozen=True)
class ChatFormat:
    """Chat template, None if there is none, and its special tokens."""

    template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt of a conversation, up to the start of the assistant's answer.

        Raise ConfigError if the template rejects the messages.
        """
        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=True, **self.special_tokens
            )
        except Exception as error:  # a template can raise any exception
            raise ConfigError(f"the model's chat template fails: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _format_json
        environment.globals |= {"raise_exception": _raise_error, "strftime_now": _format_now}
        return environment.from_string(self.template or "")


def load_chat_format(source: ModelSource) -> ChatFormat:
    """Return the chat format of a Hugging Face directory, or of model.init_from of a run."""
    files = source.pretrained_files
    tokens = {key: _get_content(files.tokenizer_config.get(key)) for key in _TOKEN_KEYS}
    return ChatFormat(
        _find_template(files),
        {key: token for key, token in tokens.items() if token is not None},
    )


def _find_template(files: PretrainedFiles) -> str | None:
    """Return the template in chat_template.jinja, or that in tokenizer_config.json."""
    for content in files.documents.values():
        return content.decode(errors="replace")
    template = files.tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def _get_content(token: Any) -> str | None:
    """Return a token of tokenizer_config.json, a string or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _raise_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(format_string: str) -> str:
    return datetime.datetime.now().strftime(format_string)


def _format_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
