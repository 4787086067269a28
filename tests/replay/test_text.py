"""The routing keys of virtual time and those of real bodies."""

from __future__ import annotations

from itertools import islice
from typing import get_args

import pytest

from warmroute.demo.load_generator.bodies import Talk, body, carried_on, messages
from warmroute.prompt.routing_request import read_json
from warmroute.replay.workloads import GENERATORS, Prompt, Segments, choose
from warmroute.replay.workloads.text import Form, beginnings
from warmroute.replay.workloads.trace import TraceBlocks
from warmroute.replay.world import MODEL, SimulatedRequest


def keys_agree(prompt: Prompt, form: Form, talk: Talk) -> None:
    virtual = SimulatedRequest(prompt, 0, form)
    asked = messages(prompt, talk) if form == "chat" else ()
    real = read_json(body(prompt, asked, MODEL, form)[1])
    assert virtual.prefix_key() == real.prefix_key()
    assert virtual.session() == real.session()
    assert not virtual.says_nothing


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("name", GENERATORS)
def test_a_body_has_the_key_that_virtual_time_routes_by(name: str, form: Form) -> None:
    for prompt in islice(choose([name]).arrive(1), 40):
        keys_agree(prompt, form, Talk())


@pytest.mark.parametrize("message_tokens", [10, 300])
def test_a_conversation_keeps_its_key_on_both_sides(message_tokens: int) -> None:
    prompt = next(iter(choose(["multi_turn_chat", f"message_tokens={message_tokens}"]).arrive(1)))
    talk, keys = Talk(), set()
    while True:
        keys_agree(prompt, "chat", talk)
        keys.add(SimulatedRequest(prompt, 0).prefix_key())
        talk = carried_on(prompt, messages(prompt, talk), "well said")
        follow_up = prompt.then() if prompt.then else None
        if follow_up is None:
            break
        prompt = follow_up.prompt
    assert len(keys) == 1


def test_short_prompts_have_keys_too() -> None:
    for tokens in (1, 2, 17):
        for system_tokens in (0, 1, 16):
            text = Segments().followed_by(tokens, tokens + 4)
            keys_agree(Prompt(tokens, 4, text, system_tokens=min(system_tokens, tokens - 1)), "chat", Talk())
            trace = TraceBlocks([7], 512, tokens, 3)
            keys_agree(Prompt(tokens, 4, trace, system_tokens=min(system_tokens, tokens - 1)), "chat", Talk())


def test_beginnings_are_kept_within_bounds() -> None:
    for number in range(5000):
        beginnings(Prompt(100, 1, Segments().followed_by(number, 101)), "completion")
    from warmroute.replay.workloads import text

    assert len(text._known) <= text._KNOWN_BEGINNINGS
