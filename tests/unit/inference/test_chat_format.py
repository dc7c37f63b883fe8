"""Chat templates, which are programs of other authors."""

from pathlib import Path

import pytest

from hlat.checkpoint.hugging_face.pretrained_files import PretrainedFiles
from hlat.config.config_errors import ConfigError
from hlat.inference.chat_format import ChatFormat, load_chat_format

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(template: str) -> str:
    return ChatFormat(template, {"bos_token": "<s>"}).render(MESSAGES)


def test_render_messages_up_to_the_start_of_the_answer() -> None:
    assert render(CHATML) == (
        "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_functions_of_transformers_are_available() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"


def test_equal_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        conversations=[MESSAGES], chat_template=CHATML, add_generation_prompt=True, bos_token="<s>"
    )
    assert [render(CHATML)] == expected


@pytest.mark.parametrize("content", ["Yes", " The answer is", "The answer: "])
@pytest.mark.parametrize(
    "template", [CHATML, CHATML.replace("m.content }}", "m.content | trim }}")]
)
def test_a_message_that_the_assistant_continues_equals_transformers(template, content) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    (expected,), _ = utils.render_jinja_template(
        conversations=[messages], chat_template=template, continue_final_message=True, bos_token=""
    )
    chat_format = ChatFormat(template, {"bos_token": ""})
    assert chat_format.render(messages, add_generation_prompt=False) == expected


class Source:
    """Model with named templates in tokenizer_config.json and in a directory."""

    def __init__(self, location: Path) -> None:
        templates = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
        self.location = location
        self.pretrained_files = PretrainedFiles(tokenizer_config={"chat_template": templates})


def test_templates_with_names(tmp_path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("c")
    source = Source(tmp_path)
    loaded = [load_chat_format(source, name).template for name in (None, "rag", "tool_use")]
    assert loaded == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="no chat template chat, only default, rag, tool_use"):
        load_chat_format(source, "chat")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id') }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_an_error(
    template: str, message: str
) -> None:
    with pytest.raises(ConfigError, match="chat template fails: ") as error:
        render(template)
    assert message in str(error.value)
