"""Chat templates that would take too much time or memory: rendering ends, and the prompts are matched by their text."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from registry_harness import CHAT, HI, new_registry, warnings
from sample_requests import assistant, user

from warmroute.config import ModelConfig
from warmroute.prompt import template_limits
from warmroute.prompt.chat_template import ChatTemplate, TemplateRejected
from warmroute.prompt.tail_rendering import TailCheck

LOOP = "{% for i in range(99999) %}"
EXPENSIVE = {
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "a loop that prints nothing": LOOP + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a recursive block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "a huge range": "{{ range(10 ** 12) | list }}",
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a list product": "{{ [messages] * 10 ** 10 }}",
    "doubling by +": "{% set ns = namespace(s='x') %}" + LOOP + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(s='x') %}" + LOOP + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(s=[1]) %}" + LOOP + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling parameters": "{% macro f(s) %}{{ f(s + s) }}{% endmacro %}{{ f('xx') }}",
    "squaring by replace": "{% set ns = namespace(s='x' * 9999) %}{{ ns.s.replace('x', ns.s.replace('x', ns.s)) }}",
    "squaring by the filter replace": "{% set s = 'x' * 9999 %}{{ s | replace('x', s | replace('x', s)) }}",
    "a wide %": "{{ '%999999999d' % 1 }}",
    "a wide % by value": "{{ '%*d' % (999999999, 1) }}",
    "a wide format": "{{ '{:>999999999}'.format(1) }}",
    "a wide format by value": "{{ '{:>{}}'.format(1, 999999999) }}",
    "a wide filter format": "{{ '%999999999d' | format(1) }}",
    "a wide center": "{{ 'x' | center(999999999) }}",
    "a wide ljust": "{{ 'x'.ljust(999999999) }}",
    "a wide zfill": "{{ ('x' | escape).zfill(999999999) }}",
    "a wide indent": "{{ 'x\ny' | indent(999999999) }}",
    "bytes": "{{ (1).to_bytes(9999999999, 'big') }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(9999999) }}",
    "a join": "{{ ('x' * 9999).join(range(99999) | map('string') | list) }}",
    "a filter join": "{{ range(99999) | map('string') | list | join('x' * 9999) }}",
    "a sum of lists": "{{ range(99999) | batch(1) | sum(start=[]) | length }}",
    "a printed list of lists": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% endfor %}{{ ns.a }}",
    "a JSON list of lists": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% endfor %}{{ ns.a | tojson }}",
    "JSON indentation": "{{ messages | tojson(indent=999999999) }}",
    "output": "{% set s = 'x' * 9999999 %}" + LOOP + "{{ s }}{% endfor %}",
    "output of a block": "{% set s = 'x' * 9999999 %}{% set t %}" + LOOP + "{{ s }}{% endfor %}{% endset %}",
    "autoescape": "{% autoescape true %}{{ messages }}{% endautoescape %}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "a long source": "x" * (1 << 19),
}


@pytest.mark.parametrize("source", EXPENSIVE.values(), ids=EXPENSIVE)
def test_an_expensive_template_is_rejected_in_about_a_second(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.1)
    began_s = time.thread_time()
    with pytest.raises(TemplateRejected):
        ChatTemplate(source, {}).render([user("hi")])
    assert time.thread_time() - began_s < 3.0


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%05.1f|%s' % (1.25, 'x') }}", "001.2|x"),
        ("{{ '%s-%s' | format(1, [2]) }}", "1-[2]"),
        ("{{ '{:>5}|{a}'.format('x', a=1) }}", "    x|1"),
        ("{{ 'x' | center(5) }}|{{ 'x'.zfill(3) }}|{{ 'a\nb' | indent(2) }}", "  x  |00x|a\n  b"),
        ("{{ 'aXa'.replace('a', 'bb') }}{{ 'aXa' | replace('a', 'c', 1) }}", "bbXbbcXa"),
        ("{{ [1, 2] + [3] }}{{ 'a' + messages[0].content + 'b' }}{{ 'n=' ~ 3 ~ none }}", "[1, 2, 3]ahibn=3None"),
        ("{{ 2 ** 10 + 7 % 4 * 3 }}{{ '-' * 3 }}{{ [1, 2, 3] | sum }}", "1033---6"),
        ("{{ ', '.join(['a', 'b']) }}{{ ['a', 1] | join('/') }}", "a, ba/1"),
        ("{{ {'a': [1, {'b': none}]} | tojson }}", '{"a": [1, {"b": null}]}'),
        ("{% for i in range(3) if i != 1 %}{{ loop.index }}{{ i }}{{ ',' if not loop.last }}{% endfor %}", "10,22"),
        ("{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "3210"),
        ("{% for i in [[1, [2]]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}"
         "{% endfor %}", "(1(2))"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ undefined_name }}{{ 1.5 }}{{ true }}", "a11.5True"),
        ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
         "{% else %}none{% endfor %}", "02"),
    ],
)  # fmt: skip
def test_ordinary_templates_print_what_they_always_did(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render([user("hi")]) == text


def test_a_loop_of_a_hundred_thousand_short_steps_is_allowed() -> None:
    assert ChatTemplate("{% for i in range(99999) %}.{% endfor %}", {}).render([user("hi")]) == "." * 99_999


CUBIC = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}ok"


def test_a_long_conversation_does_not_disable_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.1)
    template = ChatTemplate(CUBIC, {})
    with pytest.raises(TemplateRejected):
        template.render([user("hi")] * 1000)
    assert not template.disabled_reason and template.render([user("hi")] * 20) == "ok"


def test_many_tools_do_not_disable_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.1)
    template = ChatTemplate(CUBIC.replace("messages", "tools"), {})
    with pytest.raises(TemplateRejected):
        template.render([user("hi")], tools=[{"type": "function", "name": "f" * 100}] * 1000)
    assert not template.disabled_reason


def test_an_expensive_template_is_disabled_and_rejects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.1)
    template = ChatTemplate("{% if messages|length > 1 %}" + EXPENSIVE["nested loops"] + "{% endif %}ok", {})
    assert template.render([user("hi")]) == "ok"
    with pytest.raises(TemplateRejected):
        template.render([user("hi"), assistant("ho")])
    assert "CPU time" in template.disabled_reason
    began_s = time.thread_time()
    with pytest.raises(TemplateRejected):
        template.render([user("hi")])
    assert time.thread_time() - began_s < 0.05


def test_renders_in_several_threads_have_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.2)
    template = ChatTemplate("{% for m in messages %}" + EXPENSIVE["nested loops"] + "{% endfor %}ok", {})

    def render(count: int) -> str:
        try:
            return template.render([user("hi")] * count)
        except TemplateRejected:
            return "rejected"

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(render, [0, 300, 0, 300, 0, 0]))  # 300 messages do not disable it
    assert found == ["ok", "rejected", "ok", "rejected", "ok", "ok"]


def test_a_template_with_thousands_of_literals_is_not_checked_for_hours() -> None:
    source = "".join(f"{{% if 'word{number}' in messages[0].content %}}x{{% endif %}}" for number in range(400))
    began_s = time.thread_time()
    check = TailCheck(ChatTemplate(source, {}))
    assert not check.safe_for_clean_messages and time.thread_time() - began_s < 5.0


async def test_prompts_of_a_disabled_template_are_matched_by_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.05)
    path = tmp_path / "endless.jinja"
    path.write_text(EXPENSIVE["nested loops"])
    folder = Path(__file__).parent / "small-model"
    model = ModelConfig(name="m", tokenizer=str(folder), chat_template=str(path))
    async with new_registry(model) as registry:
        await registry.load_configured()
        tokenizer = registry.prompt_tokenizer("m")
        prompt = tokenizer.tokenize(CHAT, HI)
        assert prompt is not None and not prompt.exact
        completion: Any = tokenizer.tokenize(b"/v1/completions", b'{"prompt": "hi"}')
        assert completion.exact, "prompts without a template are still read exactly"
        for _ in range(2):
            await registry.verify_samples()
        [(event, fields)] = warnings(caplog)
        assert event == "chat_template_disabled" and fields["model"] == "m" and "CPU time" in fields["reason"]
