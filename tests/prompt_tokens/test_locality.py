"""Which templates may be rendered from a window, and which look too far back."""

from __future__ import annotations

import pytest
from prompt_data import template_text

from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.locality import Locality

TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("name", ["thinking", "parts", "dated", "alternating"])
def test_a_template_that_looks_around_itself_gets_a_window(name):
    assert Locality(ChatTemplate(template_text(name), TOKENS)).with_any_message


@pytest.mark.parametrize("name", ["far_tools", "far_counts", "far_first_question", "far_system_last", "far_shortens"])
def test_a_template_that_looks_far_back_gets_none(name):
    assert not Locality(ChatTemplate(template_text(name), TOKENS)).with_clean_messages


LOCAL = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "far",
    [
        "{{ messages | length }}",
        "{% if messages | selectattr('role', 'eq', 'tool') | list | length > 1 %}tools were used{% endif %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content[:1] }}{% endfor %}",
        "{% if messages | length > 12 %}it was long{% endif %}",
        "{% for m in messages %}{% if '/quiet' in m.content %}quiet{% endif %}{% endfor %}",
    ],
)
@pytest.mark.parametrize("at_the_start", [True, False])
def test_a_far_look_is_found_wherever_it_stands(far, at_the_start):
    source = far + LOCAL + PROMPT if at_the_start else LOCAL + far + PROMPT
    assert Locality(ChatTemplate(LOCAL + PROMPT, TOKENS)).with_any_message
    assert not Locality(ChatTemplate(source, TOKENS)).with_any_message


def test_a_look_at_the_first_message_does_no_harm_at_the_start_only():
    look = "{{ messages[0].content | length }}"
    assert Locality(ChatTemplate(look + LOCAL + PROMPT, TOKENS)).with_any_message
    assert not Locality(ChatTemplate(LOCAL + look + PROMPT, TOKENS)).with_any_message


def test_what_a_clean_conversation_does_not_show_is_found_with_the_templates_own_words():
    source = LOCAL + "{% for m in messages %}{% if '/quiet' in m.content %}quiet{% endif %}{% endfor %}" + PROMPT
    found = Locality(ChatTemplate(source, TOKENS))
    assert found.with_clean_messages
    assert not found.with_any_message
