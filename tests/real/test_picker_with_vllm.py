"""The picker and a real Envoy in front of two real vLLM engines: the hit rate is that of the proxy.

Both get the same requests in the same order, one at a time, and engines with empty caches. A prefill takes far longer
than everything around it, or the noise of a busy machine would decide: prompts are long, and the model is not the
tiniest.
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from envoy_process import running_envoy
from real_engine import RealEngine, make_tiny_model, running

from warmroute.lab.demo.processes import Children

sys.path.append(str(Path(__file__).resolve().parents[1] / "picker"))
from envoy_fleet import PickerProcess

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CONVERSATIONS, TURNS = 16, 5
FLAGS = ["--num-gpu-blocks-override", "2048", "--max-model-len", "4096"]
"""All conversations fit into one engine, so chance evicts nothing."""


@pytest.fixture(scope="module")
def roomy_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_tiny_model(folder, "--slower")
    engines = [RealEngine(name, model, folder, flags=FLAGS) for name in ("a", "b")]
    with running(engines):
        yield engines


def requests() -> list[list[dict[str, str]]]:
    """Return the messages of each request: conversations in turns, which share two system prompts."""
    draw = random.Random(5)

    def words(count: int) -> str:
        return " ".join(draw.choice(("router", "node", "cache", "prompt", "token", "block")) for _ in range(count))

    systems = [words(600) for _ in range(2)]
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": systems[one % 2]}, {"role": "user", "content": f"{one} {words(300)}"}]
        for one in range(CONVERSATIONS)
    ]
    found = []
    for _ in range(TURNS):
        draw.shuffle(talks)
        for talk in talks:
            found.append(list(talk))
            talk += [
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": words(draw.randrange(40, 120))},
            ]
    return found


def hit_rate(url: str) -> float:
    """Return the share of cached prompt tokens, as vLLM reports it."""
    cached = prompt = 0
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        for number, talk in enumerate(requests()):
            messages: Any = talk
            stream = bool(number % 2)
            more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=4, temperature=0, **more
            )
            usage = list(answer)[-1].usage if stream else answer.usage
            cached += usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
            prompt += usage.prompt_tokens
    return cached / prompt


def empty_caches(engines: list[RealEngine]) -> None:
    """vLLM sends the event of it with its next request."""
    body = json.dumps({"model": "tiny", "prompt": "router " * 40, "max_tokens": 1}).encode()
    for engine in engines:
        for path, data in (("/reset_prefix_cache", b""), ("/v1/completions", body)):
            fields = {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{engine.url}{path}", data, fields, method="POST")
            assert urllib.request.urlopen(asked, timeout=60.0).status == 200


@pytest.mark.parametrize(("request_mode", "responses"), [("buffered", "streamed"), ("duplex", "duplex")])
def test_the_hit_rate_is_that_of_the_proxy(
    roomy_engines: list[RealEngine], tmp_path: Path, request_mode: str, responses: str
) -> None:
    urls = [engine.url for engine in roomy_engines]
    with Children() as children:
        empty_caches(roomy_engines)
        proxy = PickerProcess(children, urls, command="serve")
        through_proxy = hit_rate(f"http://127.0.0.1:{proxy.port}")
        proxy.until_idle()
        by_proxy = proxy.metrics("warmroute_node_requests_total")
        proxy.kill()
        empty_caches(roomy_engines)
        picker = PickerProcess(children, urls)
        ports = [engine.port for engine in roomy_engines]
        with running_envoy(tmp_path, picker.port, ports, request_mode=request_mode, responses=responses) as envoy:
            through_picker = hit_rate(envoy.url)
            picker.until_idle()
            by_picker = picker.metrics("warmroute_node_requests_total")
    print(f"\n{request_mode}, {responses}: proxy {through_proxy:.3f}, picker {through_picker:.3f}")
    assert through_proxy > 0.6
    for outcomes in (by_proxy, by_picker):  # openai's client leaves after [DONE], before the end of the response
        assert sum(count for label, count in outcomes.items() if 'outcome="ok"' in label) == CONVERSATIONS * TURNS
    assert abs(through_picker - through_proxy) < 0.01
