"""The cost of each stage of the request path: best of several runs, in microseconds of CPU time.

python bench/request_path.py
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Callable
from functools import partial
from random import Random

from record import Report, add_record_option, load_average

from warmroute._kernel import ChunkReader, read_response_head
from warmroute.app.metrics.page import MetricsPage
from warmroute.config import Health, Index, NodeConfig, Routing
from warmroute.config import Journal as JournalConfig
from warmroute.core.cache_view import CacheView
from warmroute.core.calls import Call
from warmroute.core.fleet import Fleet
from warmroute.core.last_decisions import LastDecisions
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Ticket
from warmroute.core.router import Router
from warmroute.core.traffic import Counters
from warmroute.edge.http1 import read_request_head
from warmroute.edge.response import FirstTokenDetector
from warmroute.prompt.request_body import read_json

REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAccept-Encoding: gzip, deflate\r\n"
    b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    b"User-Agent: OpenAI/Python 1.99.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 1.99.0\r\n"
    b"X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
    b"X-Stainless-Runtime-Version: 3.11.7\r\nAuthorization: Bearer sk-0123456789abcdef\r\nX-Stainless-Async: false\r\n"
    b"x-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\nContent-Length: 1024\r\n\r\n"
)
RESPONSE = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 15 Nov 2026 04:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 934\r\n"
    b"content-type: application/json\r\n\r\n"
)
FIRST_CHUNKS = b"".join(
    b"%x\r\n%b\r\n" % (len(event), event)
    for event in (
        b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":%b,"logprobs":null,'
        b'"finish_reason":null}]}\n\n' % delta
        for delta in (b'{"role":"assistant","content":""}', b'{"content":"Hello"}')
    )
)
CHUNK = b"c0\r\n" + b"x" * 0xC0 + b"\r\n"


def cost_us(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the best CPU time of one call."""
    rounds = 1
    while True:
        started = time.process_time()
        for _ in range(rounds):
            work()
        took = time.process_time() - started
        if took > 0.02:
            break
        rounds *= 4
    best = took
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(rounds):
            work()
        best = min(best, time.process_time() - started)
    return best / rounds * 1e6


def chat_body(size: int) -> bytes:
    random = Random(size)
    words = ["the", "router", "sends", "each", "request", "where", "it", "costs", "least", '"quoted"', "why.\n"]

    def text(length: int) -> str:
        return " ".join(random.choice(words) for _ in range(length // 5))[:length]

    turns = 2 if size < 4096 else 8
    part = size // (turns * 2 + 1) - 40
    messages = [{"role": "system", "content": text(part * 2)}]
    for _ in range(turns):
        messages += [{"role": "user", "content": text(part)}, {"role": "assistant", "content": text(part)}]
    return json.dumps({"model": "m", "messages": messages, "stream": True, "temperature": 0.7}).encode()


def fleet_of(count: int) -> Fleet:
    fleet = Fleet(Health())
    for number in range(count):
        node = fleet.add(NodeConfig(url=f"http://127.0.0.1:{10_000 + number}", models=("m",)))
        fleet.check_passed(node, 0.0)
    return fleet


def load(fleet: Fleet) -> None:
    """Open some tickets, unevenly over the nodes."""
    for number, node in enumerate(fleet):
        for _ in range(number % 3):
            Ticket(node, 0.0)


def ticket_round(fleet: Fleet) -> None:
    node = next(iter(fleet))
    ticket = Ticket(node, 1.0)
    ticket.first_token(1.1)
    fleet.close_ticket(ticket, Outcome.OK, 1.2)


def journal_round(count: int) -> Callable[[], None]:
    """Return the journal's work for one request, on a fleet of `count` nodes."""
    fleet = fleet_of(count)
    load(fleet)
    cache_view = CacheView(Index())
    tokens = array("I", range(8_000))
    lookup = Lookup(tokens.tobytes(), len(tokens), len(tokens))
    decision = Router(fleet, cache_view, Routing(policy="price")).decide(RoutingRequest("m"), 1.0, lookup)
    decisions = LastDecisions(JournalConfig(), Counters())
    request = RoutingRequest("m", arrived_s=1.0)

    def write() -> None:
        call = Call(1, request)
        call.record = decision.record()
        decisions.add(call)
        call.outcome, call.end = Outcome.OK, (Outcome.OK, decision.node, 1, 200, 1.5, 2.0)
        decisions.complete(call)

    return write


def metrics_page(count: int) -> Callable[[], list[bytes]]:
    fleet, cache_view = fleet_of(count), CacheView(Index())
    for node in fleet:
        cache_view.add_node(node.name)
    return MetricsPage(fleet, cache_view, Counters(), lambda: (0, 0), lambda: (0, 0)).render


def read_request(body: bytes) -> RoutingRequest:
    return RoutingRequest(*read_json(b"/v1/chat/completions", body)[:4])


def read_key(body: bytes) -> bytes | None:
    return read_request(body).prefix_key()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.table("stages", "stage", "µs of CPU")
    end = REQUEST.index(b"\r\n\r\n")
    answer_end = RESPONSE.index(b"\r\n\r\n")
    frames = ChunkReader()

    def stage(name: str, work: Callable[[], object]) -> None:
        report.row(name, f"{cost_us(work):,.2f}")

    stage(f"request head, {len(REQUEST)} bytes", lambda: read_request_head(REQUEST, end))
    stage(f"response head, {len(RESPONSE)} bytes", lambda: read_response_head(RESPONSE, answer_end))
    stage("one chunk's frame", lambda: frames.feed(CHUNK))
    stage(
        "a stream's first token, after a role",
        lambda: FirstTokenDetector(chunked=True).feed(FIRST_CHUNKS),
    )
    for size in (1_024, 16_384, 131_072):
        stage(f"body to request and key, {size // 1024} KiB", partial(read_key, chat_body(size)))
    fleets = {count: fleet_of(count) for count in (2, 64, 1_000)}
    for fleet in fleets.values():
        load(fleet)
    stage("ticket, opened to closed", lambda: ticket_round(fleets[1_000]))
    for count in fleets:
        stage(f"journal, decided to ended, {count:,} nodes", journal_round(count))
    stage("metrics page, 500 nodes", metrics_page(500))
    report.table("decisions", "decision, µs of CPU", *(f"{count:,} nodes" for count in fleets))
    for policy in ("round_robin", "least_loaded", "power_of_two", "prefix_hash"):
        request = read_request(chat_body(1_024)) if policy == "prefix_hash" else RoutingRequest("m")
        routers = [Router(fleet, CacheView(Index()), Routing(policy=policy)) for fleet in fleets.values()]
        report.row(policy, *(f"{cost_us(partial(router.decide, request, 1.0)):.2f}" for router in routers))
    report.value("load", load_average())
    report.record(args.record)


if __name__ == "__main__":
    main()
