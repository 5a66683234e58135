"""Chat templates: rendered as transformers does, refused with a reason, and kept in their sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from coordinator import chat
from coordinator.chat import MAX_RENDERED_CHARACTERS, ChatTemplate, load_chat_template
from specdec.errors import InvalidArgumentError

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
STRICT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] %}{% set messages = messages[1:] %}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
[INST] {% if loop.first and system is defined %}{{ system + '\\n\\n' }}{% endif %}
{{ message['content'] | trim }} [/INST]
    {% else %}
{{ ' ' + message['content'] + eos_token }}
    {% endif %}
{% endfor %}"""
OPTIONAL = """{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}
{{ messages | tojson }}{{ strftime_now('%Y') }}"""
LOOPS = "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ message.content }}{% endfor %}"
MARKED = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
TEMPLATES = {"chatml": CHATML, "strict": STRICT, "optional": OPTIONAL, "loops": LOOPS, "marked": MARKED}
TALK = [("system", "Be brief."), ("user", "  Hi <b>é</b> & 🙂 "), ("assistant", "Yes?"), ("user", "{{ 7 * 7 }}")]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def as_transformers(template: str, messages: list[tuple[str, str]]) -> str:
    conversation: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages]
    render: Any = render_jinja_template  # its annotations leave out the template's own variables
    texts, _ = render(conversations=[conversation], chat_template=template, add_generation_prompt=True, **SPECIAL)
    return str(texts[0])


@pytest.mark.parametrize("messages", [TALK, TALK[1:], TALK[1:2]], ids=["system", "turns", "one"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_is_transformers_own(name: str, messages: list[tuple[str, str]]) -> None:
    template = TEMPLATES[name]
    assert ChatTemplate(template, SPECIAL).render(messages) == as_transformers(template, messages)


def test_messages_are_text_and_never_templates() -> None:
    assert "{{ 7 * 7 }}" in ChatTemplate(CHATML, {}).render(TALK)


def test_what_the_template_refuses_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgumentError, match="Roles must alternate") as refused:
        ChatTemplate(STRICT, SPECIAL).render([("user", "a"), ("user", "b")])
    assert list(refused.value.violations) == ["chat"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{% set x = messages[0].update({'role': 'system'}) %}",
        "{{ '%s' | attr('__class__') }}{{ ('%s' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ self._TemplateReference__context.environment.from_string }}{{ cycler.__init__.__globals__.os }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ missing.attribute }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(InvalidArgumentError, match="chat"):
        ChatTemplate(template, {}).render(TALK)


def test_a_prompt_without_end_is_refused() -> None:
    template = "{% for _ in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidArgumentError, match=str(MAX_RENDERED_CHARACTERS)):
        ChatTemplate(template, {}).render([("user", "x" * 100)])


ENDLESS = {
    "silent": "{% set x = messages[0] %}",
    "calling": "{% set x = namespace() %}",
    "empty output": "{{ '' }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_must_end_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.05)
    loop, end = "{% for _ in range(99999) %}", "{% endfor %}"
    with pytest.raises(InvalidArgumentError, match=r"longer than 0\.05 s"):
        ChatTemplate(f"{loop}{loop}{ENDLESS[name]}{end}{end}", {}).render(TALK)


# ---- where the template is found


def folder_with(path: Path, config: dict[str, Any] | None, file: str | None = None) -> Path:
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    return path


def rendered(folder: Path) -> str:
    template = load_chat_template(folder)
    assert template
    return template.render([("user", "hi")])


def test_from_the_tokenizer_s_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}", "bos_token": {"content": "<s>"}}
    assert rendered(folder_with(tmp_path, config | {"eos_token": "</s>", "pad_token": "<pad>"})) == "<s></s><pad>"


def test_from_its_own_file_first(tmp_path: Path) -> None:
    assert rendered(folder_with(tmp_path, {"chat_template": "old"}, "new é")) == "new é"


def test_the_default_of_several(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert rendered(folder_with(tmp_path, {"chat_template": several})) == "plain"


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}, {"chat_template": [{"name": "rag"}]}])
def test_a_model_without_a_template(tmp_path: Path, config: dict[str, Any] | None) -> None:
    assert load_chat_template(folder_with(tmp_path, config)) is None


def test_texts_past_the_limit_are_not_the_templates_refusal() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^chat renders to more than \d+ characters"):
        ChatTemplate("{% for _ in range(99999) %}{{ messages[0].content }}{% endfor %}", {}).render([("u", "x" * 4096)])


def test_a_refusal_quotes_without_control_characters() -> None:
    with pytest.raises(InvalidArgumentError, match=r"template: 'no \\x1b\[31m'"):
        ChatTemplate("{{ raise_exception('no ' + messages[0].role) }}", {}).render([("\x1b[31m", "x")])
