"""What policies are worth on two real vLLM engines, against what replay says of the same workload; and whether what a
decision says of a request is what the engine then does.

The workload is one of the simulator's, sent as token ids. A conversation goes on with the ids that the engine really
answered, so its blocks are where replay has them. 63 blocks of 32 tokens are too few for all conversations on each
engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean

import pytest
from real_asking import BLOCK, POLL_S, STREAM, VOCABULARY, body_of, emptied, made_up, post, routed, run, settings, told
from real_engine import RealEngine
from support import raw_client, running_router

from warmroute.config import from_table
from warmroute.lab.engine.blocks import mix64
from warmroute.lab.engine.timing import profile
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.summary import summary
from warmroute.lab.workloads import parse_workload
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import World

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
BLOCKS = 64
CHATS = "multi_turn_chat systems=2 system_tokens=64 turns=6 message_tokens=80 output_tokens=12 think_s=0.3 spread=0.3"
CLIENTS = 8
REQUESTS = 160
SEED = 1
REPLAYED = range(1, 6)
POLICIES = ("round_robin", "least_loaded", "prefix_hash", "overlap", "price")
CLEAR = 10.0
"""Points of hit rate by which two policies must differ in replay, to be held to their order here. Two runs of
one policy are some five apart: eight clients come in another order each time."""


# ---- The ranking ----


@dataclass
class Clients:
    """As many as CLIENTS, each with one conversation after the other, as the simulator's closed loop."""

    router: running_router.RunningRouter
    prompts: Iterator[WorkloadPrompt]
    left: int = REQUESTS
    prompt_tokens: int = 0
    cached_tokens: int = 0

    async def run(self) -> float:
        """Cached tokens in a hundred, as the engines told."""
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))
        return 100.0 * self.cached_tokens / self.prompt_tokens

    async def _client(self) -> None:
        for prompt in self.prompts:
            if not await self._converse(prompt):
                return

    async def _converse(self, prompt: WorkloadPrompt) -> bool:
        """False where there is nothing left to send."""
        said: list[int] = []
        while self.left:
            self.left -= 1
            new = prompt.blocks.content(1).hashes(len(said), prompt.prompt_tokens)
            said += [VOCABULARY[mix64(identity, 0) % len(VOCABULARY)] for identity in new]
            asked = body_of(said, prompt.output_tokens, **STREAM)
            answer = await self.router.request(raw_client.post(asked, "/v1/completions"))
            assert answer.status == 200 and answer.complete, answer.body
            found = told(answer.body)
            assert found.prompt_tokens == prompt.prompt_tokens and len(found.tokens) == prompt.output_tokens
            self.prompt_tokens += found.prompt_tokens
            self.cached_tokens += found.cached_tokens
            said += found.tokens
            follow_up = prompt.next_turn() if prompt.next_turn else None
            if follow_up is None:
                return True
            await asyncio.sleep(follow_up.think_ms / 1000.0)
            prompt = follow_up.prompt
        return False


def prompts(seed: int) -> Iterator[WorkloadPrompt]:
    return parse_workload(CHATS.split()).arrivals(seed)


def replayed(policy: str, seed: int) -> float:
    conditions = Conditions(seed=seed, form="tokens", islands={"local": Island(0.0)}, poll_interval_s=POLL_S)
    hardware = profile("l4-1.5b")
    specs = [NodeSpec(f"node{at}", hardware, blocks=BLOCKS, block_size=BLOCK) for at in range(2)]
    world = World(specs, conditions, from_table(settings(policy), experiment=True))
    world.run(prompts(seed), concurrency=CLIENTS, limit=REQUESTS)
    return 100.0 * float(summary(world)["hit_rate"])


def test_policies_rank_as_in_replay(real_engines: list[RealEngine]) -> None:
    expected = {policy: fmean(replayed(policy, seed) for seed in REPLAYED) for policy in POLICIES}
    found: dict[str, float] = {}

    async def work() -> None:
        for policy in POLICIES:
            await emptied(real_engines)
            async with routed(policy, *(engine.url for engine in real_engines)) as router:
                found[policy] = await Clients(router, prompts(SEED)).run()

    run(work)
    for policy in POLICIES:
        print(f"{policy:12} hit rate {found[policy]:.1f} %, in replay {expected[policy]:.1f} %")
    clear = [pair for pair in combinations(POLICIES, 2) if abs(expected[pair[0]] - expected[pair[1]]) >= CLEAR]
    assert ("round_robin", "price") in clear and len(clear) >= 6
    for one, other in clear:
        assert (found[one] > found[other]) == (expected[one] > expected[other]), (one, other, found, expected)
    assert found["price"] - found["round_robin"] > 0.5 * (expected["price"] - expected["round_robin"])


# ---- What a decision says ----


def test_a_decision_says_what_the_engine_then_finds_cached(real_engines: list[RealEngine]) -> None:
    async def work() -> None:
        await emptied(real_engines)
        async with routed("price", *(engine.url for engine in real_engines)) as router:
            talks = [made_up(100 + number, 70) for number in range(4)]
            warm = 0
            for turn in range(24):
                tokens = talks[turn % len(talks)]
                tokens += made_up(turn, 40)
                body = body_of(tokens, 12, **STREAM)
                rehearsal = {"path": "/v1/completions", "body": json.loads(body)}
                would = (await router.admin("POST", "/admin/explain", json.dumps(rehearsal).encode())).json
                asked = raw_client.post(body, "/v1/completions", [f"X-Request-Id: turn-{turn}"])
                answer = await router.request(asked)
                assert answer.status == 200 and answer.get("x-request-id") == f"turn-{turn}", answer.body
                found = told(answer.body)
                did = (await router.admin("GET", f"/admin/decisions/turn-{turn}")).json
                assert did["outcome"] == "ok" and did["answered_by"] == did["node"]
                assert did["prompt_tokens"] == found.prompt_tokens == len(tokens)
                assert did["reported"]["cached_tokens"] == found.cached_tokens
                assert did["reported"]["output_tokens"] == len(found.tokens) == 12
                assert abs(did["cached_tokens"] - found.cached_tokens) <= BLOCK, did
                if did["cached_tokens"]:
                    warm += 1
                    assert f"{did['cached_tokens']:,} of {len(tokens):,} tokens cached" in did["explanation"]
                    assert would["node"] == did["node"]
                    assert abs(would["cached_tokens"] - found.cached_tokens) <= BLOCK, would
                print(f"{did['explanation']}; {found.cached_tokens} were cached")
                tokens += found.tokens
                await asyncio.sleep(0.1)  # as long as somebody reads, and the events are there
            assert warm >= 17, "all but the first of each find their conversation; a busy machine may move one for 5 ms"

    run(work)


# ---- What a request wishes ----


@dataclass
class Tap:
    """Stands before an engine and passes all bytes on; keeps those that go there."""

    port_behind: int
    port: int = 0
    heard: list[bytearray] = field(default_factory=list)
    """By connection."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Tap]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def passed(self, name: str) -> tuple[bytes, bytes] | None:
        """Head and body of the request with this id, if it went by."""
        for heard in self.heard:
            for request in bytes(heard).split(b"POST /v1/completions HTTP/1.1\r\n")[1:]:
                head, _, body = request.partition(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n"))
                if fields.get(b"x-request-id") == name.encode():
                    return head, body[: int(fields[b"content-length"])]
        return None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self.port_behind)
        kept = bytearray()
        self.heard.append(kept)
        await asyncio.gather(_pass(reader, behind_writer, kept), _pass(behind_reader, writer, bytearray()))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    try:
        while data := await reader.read(65_536):
            kept += data
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def test_wishes_reach_the_engine_and_change_nothing_there(real_engines: list[RealEngine]) -> None:
    engine = real_engines[0]
    prompt = made_up(5, 100)
    body = b" " + body_of(prompt, 6).replace(b'": ', b'" :  ')  # as no encoder would write it
    wishes: dict[str, tuple[str, bytes, list[str]]] = {
        "first": ("high", body, ["X-Priority: high"]),
        "now-or-never": ("low", body, ["X-Priority: low", "X-Queue: no"]),
        "in-time": ("normal", body, ["X-Deadline-Ttft-Ms: 30000", "X-Deadline-Ms: 60000"]),
        "by-its-body": ("low", body_of(prompt, 6, priority=5), []),
    }

    async def work() -> None:
        plain = told(await post(engine, "/v1/completions", body))
        async with Tap(engine.port).open() as tap, routed("price", tap.url) as router:
            for name, (priority, sent, headers) in wishes.items():
                answer = await router.request(
                    raw_client.post(sent, "/v1/completions", [*headers, f"X-Request-Id: {name}"])
                )
                assert answer.status == 200 and told(answer.body).tokens == plain.tokens, answer.body
                did = (await router.admin("GET", f"/admin/decisions/{name}")).json
                assert (did["outcome"], did["priority"]) == ("ok", priority)
                passed = tap.passed(name)
                assert passed is not None and passed[1] == sent
                assert all(header.encode() in passed[0] for header in headers)
            late = ["X-Deadline-Ttft-Ms: 0.001", "X-Request-Id: late"]
            answer = await router.request(raw_client.post(body, "/v1/completions", late))
            assert answer.status == 429 and answer.error["code"] == "deadline_unreachable"
            assert tap.passed("late") is None, "what can't be in time costs the engine nothing"

    run(work)
