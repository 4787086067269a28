"""Which chat templates allow tail rendering, and which depend on messages far back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from prompt_data import template_text

from warmroute.prompt import tail_rendering
from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.plain_chats import LayoutCheck
from warmroute.prompt.tail_rendering import TailCheck
from warmroute.prompt.template_messages import RenderContext

TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}


def check(source: str) -> TailCheck:
    return TailCheck(ChatTemplate(source, TOKENS))


@pytest.mark.parametrize("name", ["thinking", "parts", "dated", "alternating", "llama"])
def test_a_template_that_depends_on_near_messages_only_is_safe(name: str) -> None:
    assert check(template_text(name)).safe_for_all_messages


@pytest.mark.parametrize("name", ["far_tools", "far_counts", "far_first_question", "far_system_last", "far_shortens"])
def test_a_template_that_depends_on_far_messages_is_not_safe(name: str) -> None:
    assert not check(template_text(name)).safe_for_clean_messages


MESSAGES = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
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
def test_dependence_on_far_messages_is_found_anywhere_in_the_template(far: str, at_the_start: bool) -> None:
    source = far + MESSAGES + PROMPT if at_the_start else MESSAGES + far + PROMPT
    assert check(MESSAGES + PROMPT).safe_for_all_messages
    assert not check(source).safe_for_all_messages


def test_dependence_on_the_first_message_is_harmless_only_at_the_start() -> None:
    first = "{{ messages[0].content | length }}"
    assert check(first + MESSAGES + PROMPT).safe_for_all_messages
    assert not check(MESSAGES + first + PROMPT).safe_for_all_messages


def test_dependence_that_only_the_templates_own_strings_trigger_is_found() -> None:
    found = check(
        MESSAGES + "{% for m in messages %}{% if '/quiet' in m.content %}quiet{% endif %}{% endfor %}" + PROMPT
    )
    assert found.safe_for_clean_messages
    assert not found.safe_for_all_messages


# ---- What a check may cost ----


def is_used(source: str) -> tuple[bool, bool]:
    template = ChatTemplate(source, TOKENS)
    return TailCheck(template).safe_for_clean_messages, LayoutCheck(template).enabled


def test_a_template_that_searches_for_very_many_strings_is_not_checked() -> None:
    many = "".join(f"{{% if 'word{number}' in messages[0].content %}}x{{% endif %}}" for number in range(200))
    assert is_used(MESSAGES + PROMPT) == (True, True)
    assert is_used(MESSAGES + PROMPT + f"{{% if false %}}{many}{{% endif %}}") == (False, False)


def test_a_check_that_takes_too_long_ends_and_the_template_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_rendering, "MAX_CHECK_S", -1.0)
    assert is_used(MESSAGES + PROMPT) == (False, False)


def test_a_request_is_checked_in_its_own_threads_time() -> None:
    template = ChatTemplate(MESSAGES + PROMPT, TOKENS)
    tails, layouts = TailCheck(template), LayoutCheck(template)
    with ThreadPoolExecutor(1) as threads:  # its clock starts at 0
        assert threads.submit(tails.passes_for, RenderContext(template)).result()
        assert threads.submit(layouts.layout, RenderContext(template)).result() is not None
    assert tails.passes_for(RenderContext(template))
    assert layouts.layout(RenderContext(template)) is not None
