"""The picker and a real Envoy in front of two real vLLM engines: the hit rate is that of the proxy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from envoy_process import running_envoy
from real_engine import RealEngine

from warmroute.demo.child_processes import Children

sys.path.append(str(Path(__file__).resolve().parents[1] / "picker"))
from envoy_fleet import PickerProcess

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


ROUNDS = 6
"""Of two conversations each, which fit into the engines' caches of 64 blocks together: so chance evicts nothing."""


def hit_rate(url: str, salt: str) -> float:
    """Run conversations of several turns, in turns. Return the share of cached prompt tokens, as vLLM reports it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0)
    cached = prompt = 0
    for round_number in range(ROUNDS):
        talks: list[list[Any]] = [
            [{"role": "user", "content": f"{salt} {round_number} {number} " + f"tell me more about {number} " * 6}]
            for number in range(2)
        ]
        for turn in range(4):
            for talk in talks:
                stream = bool(turn % 2)
                more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                answer = client.chat.completions.create(
                    model="tiny", messages=talk, max_tokens=4, temperature=0, **more
                )
                usage = list(answer)[-1].usage if stream else answer.usage
                cached += usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
                prompt += usage.prompt_tokens
                talk += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and then {turn} " * 4}]
    return cached / prompt


@pytest.mark.parametrize(("request_mode", "responses"), [("buffered", "streamed"), ("duplex", "duplex")])
def test_the_hit_rate_is_that_of_the_proxy(
    real_engines: list[RealEngine], tmp_path: Path, request_mode: str, responses: str
) -> None:
    urls = [engine.url for engine in real_engines]
    with Children() as children:
        proxy = PickerProcess(children, urls, command="serve")
        through_proxy = hit_rate(f"http://127.0.0.1:{proxy.port}", f"proxy {request_mode}")
        picker = PickerProcess(children, urls)
        with running_envoy(
            tmp_path, picker.port, [engine.port for engine in real_engines], request_mode=request_mode,
            responses=responses,
        ) as envoy:  # fmt: skip
            through_picker = hit_rate(envoy.url, f"envoy {request_mode}")
        picker.until_idle()
    print(f"\n{request_mode}, {responses}: proxy {through_proxy:.3f}, picker {through_picker:.3f}")
    assert through_proxy > 0.4
    assert abs(through_picker - through_proxy) < 0.01 or through_picker > through_proxy
