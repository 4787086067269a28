"""The latency of a routing decision, from a request's body to its tokens, their blocks and the node.

    python bench/decision_latency.py --data DIR [--tokenizer DIR]

Run it on an idle machine. Conversations are made of the text of real chats, and no text is used twice. Each turn adds
the assistant's answer and the user's next question (chat), or a tool call and its result (agent, with ten tools). The
first turn is cold, the others are warm.

    match        reads the body, hashes its blocks of 16 tokens, and matches them against 64 nodes, of which eight hold
                 the conversation so far and all hold the first block
    decision     the router's whole work from the body to the node, under the default policy
    accounting   what follows a decision: dispatch, first token, usage, end
    price        the router's work for 8,000 tokens that are already read, on 64 or 1,000 nodes with full caches, of
                 which an eighth hold the prompt, and on 64 prefill and 64 decode nodes; `decided again` is the same for
                 a queued request, whose match is known

Times are of one thread: wall time, and CPU time, which other processes do not change.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import gzip
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from external_data import add_data_option, data_files
from record import Report, add_record_option, load_average

from warmroute.app.service import GC_THRESHOLD
from warmroute.config import Config, Health, Index, ModelConfig, NodeConfig, Routing
from warmroute.config.nodes import Role
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Ticket
from warmroute.core.node_cache import Tier
from warmroute.core.router import Router
from warmroute.core.tickets import PromptTicket
from warmroute.core.traffic import Counters
from warmroute.edge.arrival import lookup_of
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.reader import PromptReader
from warmroute.prompt.registry import TokenizerRegistry
from warmroute.prompt.request_body import read_json

CHAT = b"/v1/chat/completions"
BLOCK_TOKENS = 16
NODES, HOLDERS = 64, 8
TURNS = 12
CHARACTERS_PER_TOKEN = 4.3
CHATS, TOKENIZER = "chats/mt_bench_101.jsonl.gz", "tokenizers/qwen3-rebuilt"


class ChatText:
    """A source of text that does not repeat."""

    def __init__(self, chats: Path) -> None:
        with gzip.open(chats, "rt") as lines:
            texts = [m["content"] for line in lines for m in json.loads(line)["messages"]]
        self._text = "\n".join(texts)
        self._at = 0
        self._round = 0

    def take(self, characters: int) -> str:
        if self._at + characters > len(self._text):
            self._at, self._round = 0, self._round + 1
        text = self._text[self._at : self._at + characters]
        self._at += characters
        return f"{text} ({self._round}.{self._at})"


def tools(text: ChatText) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": text.take(600),
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string", "description": text.take(200)}},
                },
            },
        }
        for number in range(10)
    ]


def turns(text: ChatText, tokens: int, agent: bool, offered: list[dict[str, Any]]) -> Iterator[bytes]:
    """Return the bodies of one conversation's turns. The last one has about `tokens` tokens."""
    size, new = int(tokens * CHARACTERS_PER_TOKEN), 900
    messages: list[dict[str, Any]] = [{"role": "system", "content": text.take(2_000)}]
    messages.append({"role": "user", "content": text.take(1_000)})
    number = 0

    def add(characters: int) -> None:
        nonlocal number
        number += 1
        if not agent:
            messages.append({"role": "assistant", "content": text.take(characters * 2 // 3)})
            messages.append({"role": "user", "content": text.take(characters // 3)})
            return
        call = {"name": f"tool_{number % 10}", "arguments": json.dumps({"path": text.take(60)})}
        call_id = f"call_{number}"
        thought = {"content": text.take(characters // 5), "reasoning_content": text.take(characters // 5)}
        calls = [{"id": call_id, "type": "function", "function": call}]
        messages.append({"role": "assistant", **thought, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text.take(characters * 3 // 5)})

    written = 3_000 + (10_000 if agent else 0)
    while written < size - TURNS * new:
        add(2_400)
        written += 2_400
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 500, "messages": messages}
    if agent:
        body["tools"] = offered
    for _turn in range(TURNS):
        add(new)
        yield json.dumps(body).encode()


def percentiles(samples: list[float]) -> tuple[str, str]:
    """Return p50 and p99 in milliseconds."""
    ordered = sorted(samples)
    middle, late = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"{middle * 1e3:.3f}", f"{late * 1e3:.3f}"


class Stopwatch:
    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def time(self, work: Callable[..., Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        made = work()
        self.cpu.append(time.thread_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return made

    def report(self, report: Report, what: str) -> None:
        report.row(what, *percentiles(self.cpu), *percentiles(self.wall))


class RoutedFleet:
    """A router and its fleet, as the service builds them. Every node sends KV events."""

    def __init__(self, tokenizer_registry: TokenizerRegistry, config: Config) -> None:
        self.fleet = Fleet(config.health)
        self.cache_view = CacheView(config.index)
        self.router = Router(self.fleet, self.cache_view, config.routing)
        self.prompt_reader = PromptReader(tokenizer_registry, config.prompts, Counters())
        self._now_s = 1.0
        for number in range(NODES):
            node = self.fleet.add(NodeConfig(url=f"http://10.0.0.{number}:8000", name=f"node-{number}", models=("m",)))
            self.fleet.check_passed(node, 0.0)
            cache = self.cache_view.add_node(node.name, ["m"])
            cache.set_size(BLOCK_TOKENS, 1_000_000)
            cache.add_rank(0)
            cache.set_complete(0, True)

    def store(self, hashes: bytes) -> None:
        """Store the conversation on eight nodes and its first block on all; advance the clock."""
        self._now_s += 5.0
        for number, cache in enumerate(self.cache_view):
            cache.last_contact_s = self._now_s
            stored = hashes if number < HOLDERS else hashes[:8]
            self.cache_view.index.store_hashes(cache.ranks[0], stored, Tier.GPU)
        self.cache_view.tidy(self._now_s)

    def decide(self, body: bytes) -> Decision:
        model, system, user, session, outline = read_json(CHAT, body)[:5]
        request = RoutingRequest(model, system, user, session)
        prompt = self.prompt_reader.read(request.model, CHAT, body, lambda _: None, outline)
        assert isinstance(prompt, Prompt), "the body should be read without a thread"
        return self.router.decide(request, self._now_s, lookup_of(prompt, ""))

    def account(self, decision: Decision) -> None:
        ticket = self.router.open_ticket(decision, decision.node, self._now_s)
        assert isinstance(ticket, PromptTicket) and ticket.prediction is not None and ticket.prediction.tokens
        ticket.first_token(self._now_s)
        ticket.record_usage(ticket.prediction.prompt_tokens, ticket.prediction.tokens, 300, self._now_s)
        ticket.close(Outcome.OK, self._now_s)


COLUMNS = ("CPU p50, ms", "p99", "wall p50, ms", "p99")


def measure(
    report: Report, registry: TokenizerRegistry, text: ChatText, tokens: int, agent: bool, conversations: int
) -> None:
    routed = RoutedFleet(registry, Config())
    reader = registry.prompt_tokenizer("m")
    offered = tools(text)
    cold, begun, warm, matched, decided, accounted = (Stopwatch() for _ in range(6))
    count, size = 0, 0

    def hashes_of(prompt: Prompt | None) -> bytes:
        assert prompt is not None and prompt.exact_tokens == prompt.token_count
        return lookup_of(prompt, "").blocks("m", "", BLOCK_TOKENS)

    def match(body: bytes) -> bytes:
        hashes = hashes_of(reader.tokenize(CHAT, body))
        routed.cache_view.index.match(hashes)
        return hashes

    for _conversation in range(conversations):
        for turn, body in enumerate(turns(text, tokens, agent, offered)):
            if turn == 0:
                hashes = hashes_of(cold.time(lambda body=body: reader.tokenize(CHAT, body)))
            elif turn % 3 == 1:
                begun.time(lambda body=body: reader.begin(CHAT, body))
                prompt = warm.time(lambda body=body: reader.tokenize(CHAT, body))
                assert prompt.warm_tokens
                hashes = hashes_of(prompt)
            elif turn % 3 == 2:
                hashes = matched.time(lambda body=body: match(body))
            else:
                decision = decided.time(lambda body=body: routed.decide(body))
                accounted.time(lambda decision=decision: routed.account(decision))
                count = decision.query.lookup.token_count
                hashes = decision.query.lookup.blocks("m", "", BLOCK_TOKENS)
            size = len(body)
            routed.store(hashes)
    routed.prompt_reader.close()
    kind = "agent" if agent else "chat"
    report.table(f"{kind}_{tokens // 1000}k", f"{kind}, {count:,} tokens, {size // 1000} KB", *COLUMNS)
    begun.report(report, "begin only, warm")
    warm.report(report, "body to tokens, warm")
    matched.report(report, "body to match, warm")
    decided.report(report, f"body to decision by `{routed.router.policy.name}`, warm")
    accounted.report(report, "accounting, dispatch to end")
    cold.report(report, "body to tokens, cold")


def longest_pause(report: Report, reader: PromptTokenizer, text: ChatText, tokens: int) -> None:
    """Report how long other threads wait while one reads cold prompts."""
    pauses, size = [0.0], 0
    for _round in range(5):
        body = next(turns(text, tokens, agent=False, offered=[]))
        size = len(body)
        thread = threading.Thread(target=reader.tokenize, args=(CHAT, body))
        last = time.perf_counter()
        thread.start()
        while True:
            alive, now = thread.is_alive(), time.perf_counter()
            pauses.append(now - last)
            last = now
            if not alive:
                break
    report.value("cold_kb", size // 1000)
    report.value("longest_pause_ms", f"{max(pauses) * 1e3:.1f}")


def price_decisions(report: Report, count: int, with_roles: bool = False) -> None:
    """Report the latency of a decision by price on `count` nodes; half of them prefill nodes, the others decode nodes
    if they have roles."""
    roles: tuple[Role, Role] = ("prefill", "decode") if with_roles else ("mixed", "mixed")
    fleet, cache_view = Fleet(Health(slow_start_s=0.0)), CacheView(Index())
    tokens = Random(1).randbytes(4 * 8_000)
    for number in range(count):
        config = NodeConfig(url=f"http://10.0.0.0:{number + 1}", name=f"node-{number}", models=("m",), engine="vllm")
        node = fleet.add(msgspec.structs.replace(config, role=roles[number % 2]))
        fleet.check_passed(node, 0.0)
        cache = cache_view.add_node(node.name, ["m"])
        cache.set_size(BLOCK_TOKENS, 300_000)
        cache.record_output(300_000, 0.0)
        cache.accuracy.compare(8_000, 7_000, 0.0)
        node.speed.factor = 1.0 + number / count
        if with_roles and number % 2:  # it decodes an answer
            Ticket(node, 0.0).first_token(0.0, False)
        if number % 8 == 0:
            cache_view.record_routed("m", Lookup(tokens, 8_000, 8_000), node.name, None, 1.0)
    router = Router(fleet, cache_view, Routing(policy="price"))
    decided, again = Stopwatch(), Stopwatch()
    for number in range(500):
        now_s = 2.0 + number / 100.0
        lookup = Lookup(tokens, 8_000, 8_000)
        request = RoutingRequest("m", may_split=with_roles)
        decision = decided.time(
            lambda request=request, lookup=lookup, now_s=now_s: router.decide(request, now_s, lookup)
        )
        again.time(lambda query=decision.query, now_s=now_s: router.decide_again(query, now_s))
    fleet_text = f"{count // 2} prefill and {count // 2} decode nodes" if with_roles else f"{count:,} nodes"
    decided.report(report, f"decision by `price`, {fleet_text}")
    again.report(report, "the same, decided again")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, CHATS, f"{TOKENIZER}/")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help=f"another tokenizer than {TOKENIZER}")
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    chats, *tokenizer = data_files(args.data, CHATS, *([] if args.tokenizer else [TOKENIZER]))
    [folder] = tokenizer or [args.tokenizer]
    text = ChatText(chats)
    started = time.perf_counter()
    tokenizer_registry = TokenizerRegistry(Config().prompts, [ModelConfig(name="m", tokenizer=str(folder))])
    await tokenizer_registry.load_configured()
    reader = tokenizer_registry.prompt_tokenizer("m")
    print(f"{folder.name}: loaded in {time.perf_counter() - started:.1f} s")
    gc.collect()  # as the service does once it has started
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    for agent in (False, True):
        measure(report, tokenizer_registry, text, 8_000, agent, conversations=40)
        measure(report, tokenizer_registry, text, 47_000, agent, conversations=20)
    report.table("price", "8,000 tokens", *COLUMNS)
    price_decisions(report, 64)
    price_decisions(report, 1_000)
    price_decisions(report, 128, with_roles=True)
    longest_pause(report, reader, text, 47_000)
    assert reader.chats is not None
    print(f"token cache: {len(reader.chats.token_cache)} prefixes in {reader.chats.used_bytes / 1e6:.1f} MB")
    print(f"sample verified: {reader.verify_sample()}, failed checks: {reader.chats.failed_checks}")
    tokenizer_registry.close()
    report.value("load", load_average())
    report.record(args.record)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
