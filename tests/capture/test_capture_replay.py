"""The replay of a capture has the hit rate that was measured live: engines as processes, conversations over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.engine_processes import FakeEngine
from support.raw_client import post
from support.running_router import RunningRouter, router

from warmroute.lab.demo.processes import Children
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.tokenizers import WORDS
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import NodeSpec
from warmroute.lab.summary import measure
from warmroute.lab.workloads import Trace

ENGINES = 2
CONVERSATIONS = 4
TURNS = 4
OUTPUT_TOKENS = 60
BLOCKS = 1000
SPEED = 20


async def converse(r: RunningRouter) -> None:
    """Send conversations in turn, one request after the other: what is cached does not depend on the speed."""
    random = Random(1)
    system = {"role": "system", "content": " ".join(random.choices(WORDS, k=200))}
    chats: list[list[dict[str, str]]] = [[system] for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for messages in chats:
            words = 40 if turn else 400
            messages.append({"role": "user", "content": " ".join(random.choices(WORDS, k=words))})
            body: dict[str, Any] = {"model": "sim", "messages": messages, "max_tokens": OUTPUT_TOKENS}
            response = await r.request(post(json.dumps(body).encode()))
            assert response.status == 200, response.body
            messages.append({"role": "assistant", "content": response.json["choices"][0]["message"]["content"]})


@pytest.mark.parametrize("policy", ["round_robin", "price"])
async def test_a_replayed_capture_has_the_measured_hit_rate(tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "captures"
    with Children() as children:
        engines = await asyncio.gather(
            *(asyncio.to_thread(FakeEngine, children, speed=SPEED, blocks=BLOCKS) for _ in range(ENGINES))
        )
        tables: dict[str, Any] = {
            "routing": {"policy": policy, "seed": 7},
            "prompts": {"remote_tokenize": True},
            "capture": {"directory": str(folder)},
        }
        async with router(*({"url": engine.url} for engine in engines), **tables) as r:
            await converse(r)
            r.service.write_ended_calls()
            await r.service.capture.flush()
    past = measure(Trace(folder))
    assert past is not None and past.requests == CONVERSATIONS * TURNS and past.hit_rate is not None
    nodes = tuple(NodeSpec(f"node{at}", profile("h200-1.5b"), blocks=BLOCKS) for at in range(ENGINES))
    run = replay(Setup(workload=Trace(folder, speed=1 / SPEED), nodes=nodes, policy=parse_policy(policy)))
    assert run["finished"] == past.requests
    assert run["hit_rate"] == pytest.approx(past.hit_rate, abs=0.02)
    assert past.hit_rate > (0.4 if policy == "round_robin" else 0.7)
