"""Simulated requests have the same routing keys as the bodies that the load generator sends."""

from __future__ import annotations

from itertools import islice
from typing import get_args

import pytest

from warmroute.core.messages import RoutingRequest
from warmroute.lab.load import ConversationHistory, build_request, chat_messages, extend_history
from warmroute.lab.request_flow import MODEL, simulated_request
from warmroute.lab.workloads import GENERATORS, parse_workload
from warmroute.lab.workloads.trace import TraceBlocks
from warmroute.lab.workloads.workload_prompt import Form, Segments, WorkloadPrompt, leading_text
from warmroute.prompt.request_body import read_json


def assert_same_keys(prompt: WorkloadPrompt, form: Form, history: ConversationHistory) -> None:
    simulated = simulated_request(prompt, 0, form)
    sent = chat_messages(prompt, history) if form == "chat" else ()
    path, body = build_request(prompt, sent, MODEL, form)
    real = RoutingRequest(*read_json(path.encode(), body)[:4])
    assert simulated.prefix_key() == real.prefix_key() is not None
    assert simulated.session_key() == real.session_key()


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("name", GENERATORS)
def test_a_body_has_the_key_of_its_simulated_request(name: str, form: Form) -> None:
    for prompt in islice(parse_workload([name]).arrivals(1), 40):
        assert_same_keys(prompt, form, ConversationHistory())


@pytest.mark.parametrize("message_tokens", [10, 300])
def test_a_conversation_keeps_its_key_in_every_turn(message_tokens: int) -> None:
    prompt = next(iter(parse_workload(["multi_turn_chat", f"message_tokens={message_tokens}"]).arrivals(1)))
    history, keys = ConversationHistory(), set()
    while True:
        assert_same_keys(prompt, "chat", history)
        keys.add(simulated_request(prompt, 0).prefix_key())
        history = extend_history(prompt, chat_messages(prompt, history), "well said")
        follow_up = prompt.next_turn() if prompt.next_turn else None
        if follow_up is None:
            break
        prompt = follow_up.prompt
    assert len(keys) == 1


def test_short_prompts_have_the_same_keys() -> None:
    for tokens in (1, 2, 17):
        for system_tokens in (0, 1, 16):
            for blocks in (Segments().followed_by(tokens, tokens + 4), TraceBlocks([7], 512, tokens, 3)):
                prompt = WorkloadPrompt(tokens, 4, blocks, system_tokens=min(system_tokens, tokens - 1))
                assert_same_keys(prompt, "chat", ConversationHistory())


def test_the_cache_of_leading_texts_is_bounded() -> None:
    for number in range(5000):
        leading_text(WorkloadPrompt(100, 1, Segments().followed_by(number, 101)), "completion")
    from warmroute.lab.workloads import workload_prompt

    assert len(workload_prompt._cache) <= workload_prompt._CACHE_SIZE
