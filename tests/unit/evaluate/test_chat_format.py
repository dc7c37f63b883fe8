"""Chat templates, which are programs of other authors."""

import pytest

from hlat.config.config_errors import ConfigError
from hlat.evaluate.chat_format import ChatFormat

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
