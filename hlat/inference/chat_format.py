"""Chat template of a model in Hugging Face format, or of a run that continues one.

A template is a program of another author. It is rendered in Jinja's immutable sandbox, as in
transformers, so that it can access the messages and special tokens only.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hlat.config.config_errors import ConfigError
from hlat.data.prompt_tokenizer import get_token_content
from hlat.inference.model_source import ModelSource
from hlat.storage.bounded_files import read_bounded

_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Keys of tokenizer_config.json that templates use."""
_MORE_TEMPLATES = "additional_chat_templates"
"""Directory of further templates, as in transformers."""
_END_OF_PROMPT = "END_OF_PROMPT "
"""Text after a message that the assistant continues, which finds its end in the prompt."""


@dataclass(frozen=True)
class ChatFormat:
    """Chat template, None if there is none, and its special tokens."""

    template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation, up to the start of the assistant's answer.

        Without `add_generation_prompt`, the prompt ends in the last message, which the assistant
        continues. Raise ConfigError if the template rejects the messages.
        """
        if not add_generation_prompt:
            *others, last = messages
            messages = [*others, {**last, "content": last["content"] + _END_OF_PROMPT}]
        try:
            text = self._compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # a template can raise any exception
            raise ConfigError(f"the model's chat template fails: {error}") from error
        return text if add_generation_prompt else _remove_end(text)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _format_json
        environment.globals |= {"raise_exception": _raise_error, "strftime_now": _format_now}
        return environment.from_string(self.template or "")


def load_chat_format(source: ModelSource, name: str | None = None) -> ChatFormat:
    """Return the chat format of a Hugging Face directory, or of model.init_from of a run.

    Raise ConfigError if `name` is given and the model has no template of this name.
    """
    files, templates = source.pretrained_files, _list_templates(source)
    if name is not None and name not in templates:
        names = f"only {', '.join(sorted(templates))}" if templates else "and no other"
        raise ConfigError(f"{source.location} has no chat template {name}, {names}")
    tokens = {key: get_token_content(files.tokenizer_config.get(key)) for key in _TOKEN_KEYS}
    return ChatFormat(
        templates.get(name or "default"),
        {key: token for key, token in tokens.items() if token is not None},
    )


def _list_templates(source: ModelSource) -> dict[str, str]:
    """Return the templates by name; `default` is that of chat_template.jinja, if it exists."""
    files = source.pretrained_files
    configured = files.tokenizer_config.get("chat_template")
    if not isinstance(configured, list):  # several templates with names
        configured = [{"name": "default", "template": configured}]
    named = {item.get("name"): item.get("template") for item in configured if type(item) is dict}
    for content in files.documents.values():
        named["default"] = content.decode(errors="replace")
    if isinstance(source.location, Path):
        for file in sorted((source.location / _MORE_TEMPLATES).glob("*.jinja")):
            named[file.stem] = read_bounded(file).decode(errors="replace")
    return {str(name): text for name, text in named.items() if isinstance(text, str)}


def _remove_end(text: str) -> str:
    """Return the text before the end of the prompt, without a space that the template removed."""
    prompt, end, _ = text.rpartition(_END_OF_PROMPT)
    if end:
        return prompt
    prompt, end, _ = text.rpartition(_END_OF_PROMPT.strip())
    if not end:
        raise ConfigError("the model's chat template removes the last message")
    return prompt.rstrip()


def _raise_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(format_string: str) -> str:
    return datetime.datetime.now().strftime(format_string)


def _format_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
