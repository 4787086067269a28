"""Four planted faults in front of a real router: does it notice within a minute, name the cause, and state the cost?

    python bench/planted_faults.py --data DIR [--scenario time_stamp]

Conversations of real chats (MT-Bench-101) go to applications with a system prompt and tools each, through a
router to simulated engines in their own processes, in real time. In the middle of the run one thing changes:

    time_stamp   each system prompt begins with the current time
    tool_id      the description of one tool contains a random id
    small_cache  the engines restart with half of their KV blocks
    lost_events  half of the engines' KV events are lost, and there is no replay of them

All requests and their times are fixed in advance. `warmroute replay` gets the same requests as traces, with and without
the fault. The difference of the GPUs' busy time is what the fault costs; the router states its own estimate. Replays
with other seeds differ by some GPU seconds, because other requests happen to share a decode step. So the cost is the
mean of REPLAYS pairs, with its standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import re
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any, NamedTuple

from external_data import add_data_option, data_files
from record import Report, add_record_option, load_average

from warmroute.lab.demo.processes import Child, Children, RouterProcess, free_port, start_router
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.tokenizers import ModelTokenizer
from warmroute.lab.load import RequestFailed, RequestRefused, send_streaming
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads import parse_workload

CHATS, TOKENIZER = "chats/mt_bench_101.jsonl.gz", "tokenizers/qwen3-rebuilt"
PROFILE = "l4-8b"
NODES = 4
APPLICATIONS = {"small_cache": 40}
DEFAULT_APPLICATIONS = 12
TURN_S = 12.0
"""Time between two turns of a conversation."""
OUTPUT_TOKENS = 12
BLOCK = 16
BLOCKS = {"small_cache": 1200}
"""KV blocks of a node; the profile's own in the other scenarios."""
REPLAYS = 8
SCENARIOS = ("time_stamp", "tool_id", "small_cache", "lost_events")
CHANGED_PROMPTS = ("time_stamp", "tool_id")
EXPECTED = {
    "time_stamp": "prompts_changed", "tool_id": "prompts_changed", "small_cache": "cache_too_small",
    "lost_events": "kv_events_lost",
}  # fmt: skip
TOPICS = ("orders", "customers", "products", "returns", "prices", "stock")
WORDS = [
    "always",
    "answer",
    "politely",
    "check",
    "the",
    "policy",
    "before",
    "you",
    "promise",
    "anything",
    "to",
    "a",
    "customer",
    "never",
    "invent",
    "numbers",
    "quote",
    "the",
    "source",
    "keep",
    "it",
    "short",
    "ask",
    "when",
    "something",
    "is",
    "unclear",
    "refuse",
    "what",
    "the",
    "rules",
    "forbid",
    "and",
    "explain",
    "why",
    "in",
    "plain",
    "words",
]


class Planned(NamedTuple):
    """One request, without and with the fault in its prompt."""

    at_s: float
    healthy: dict[str, Any]
    faulty: dict[str, Any]


# The requests.


def application(number: int) -> tuple[str, list[dict[str, Any]]]:
    random = Random(number)
    rules = (f"Rule {rule}: " + " ".join(random.choices(WORDS, k=22)) + "." for rule in range(34))
    system = f"You are the assistant of shop {number}.\n" + "\n".join(rules)
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"find_{topic}_{number}",
                "description": f"Find {topic} of shop {number}. " + " ".join(random.choices(WORDS, k=20)) + ".",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
            },
        }
        for topic in TOPICS
    ]
    return system, tools


def plan(chats: Sequence[list[dict[str, str]]], scenario: str, rate: float, seconds: float, seed: int) -> list[Planned]:
    random = Random(seed)
    count = APPLICATIONS.get(scenario, DEFAULT_APPLICATIONS)
    applications = [application(number) for number in range(count)]
    planned: list[Planned] = []
    started_s = 0.0
    while len(planned) < rate * seconds * 1.3:
        started_s += random.expovariate(rate / 3.0)
        system, tools = random.choice(applications)
        chat = [message for message in random.choice(chats)[:6] if message["role"] in ("user", "assistant")]
        for turn in range(1, len(chat) + 1, 2):
            at_s = started_s + TURN_S * (turn // 2) + random.uniform(0, 2)
            planned.append(_request(scenario, at_s, system, tools, chat[:turn], random))
    return sorted((one for one in planned if one.at_s < seconds), key=lambda one: one.at_s)


def _request(
    scenario: str, at_s: float, system: str, tools: list[dict[str, Any]], chat: list[dict[str, str]], random: Random
) -> Planned:
    def body(system: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "model": "sim", "messages": [{"role": "system", "content": system}, *chat], "tools": tools, "stream": True,
            "stream_options": {"include_usage": True}, "max_tokens": OUTPUT_TOKENS,
        }  # fmt: skip

    healthy = faulty = body(system, tools)
    if scenario == "time_stamp":
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_790_000_000 + at_s))
        faulty = body(f"Current time: {stamp}.{random.randrange(1000):03}Z\n{system}", tools)
    elif scenario == "tool_id":
        changed = json.loads(json.dumps(tools))
        changed[0]["function"]["description"] += f" Trace {uuid.UUID(int=random.getrandbits(128))}."
        faulty = body(system, changed)
    return Planned(at_s, healthy, faulty)


# Replay.


def write_trace(path: Path, bodies: Sequence[tuple[float, dict[str, Any]]], tokenizer: ModelTokenizer) -> None:
    with path.open("w") as file:
        for at_s, body in bodies:
            tokens = tokenizer.encode(tokenizer.render(body["messages"], body["tools"], True))
            ids: list[int] = []
            chain = 17
            for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
                chain = hash((chain, *tokens[start : start + BLOCK]))
                ids.append(abs(chain))
            row = {
                "timestamp": at_s * 1000.0, "input_length": len(tokens), "output_length": OUTPUT_TOKENS,
                "hash_ids": ids,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


class Cost(NamedTuple):
    gpu_s: float
    error_s: float
    """Its standard error."""


def replayed_cost(healthy: Path, faulty: Path) -> Cost:
    """Return the GPU seconds that the fault costs by replay."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        seeds = range(1, REPLAYS + 1)
        before, after = (list(pool.map(busy_gpu_s, [path] * REPLAYS, seeds)) for path in (healthy, faulty))
    costs = [with_s - without_s for with_s, without_s in zip(after, before, strict=True)]
    return Cost(mean(costs), stdev(costs) / REPLAYS**0.5)


def busy_gpu_s(path: Path, seed: int) -> float:
    nodes = tuple(NodeSpec(f"gpu-{number}", profile(PROFILE)) for number in range(NODES))
    workload = parse_workload([str(path), f"id_tokens={BLOCK}"])
    conditions = Conditions(seed=seed)
    run = replay(Setup(workload=workload, nodes=nodes, policy=parse_policy("price"), conditions=conditions))
    return float(run["gpu_seconds"])


# The live run.


class Engine:
    def __init__(self, children: Children, data: Path, blocks: int | None, port: int, events_port: int) -> None:
        self.children, self.data, self.port, self.events_port = children, data, port, events_port
        self.child = self._start(blocks)

    def _start(self, blocks: int | None) -> Child:
        child = self.children.start(
            "engine", "--port", str(self.port), "--profile", PROFILE, "--events-port", str(self.events_port),
            "--tokenizer", str(self.data / TOKENIZER), *(("--blocks", str(blocks)) if blocks else ()),
        )  # fmt: skip
        child.first_line()
        return child

    def restart(self, blocks: int) -> None:
        self.children.end(self.child)
        self.child = self._start(blocks)

    def fail(self, **fault: Any) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/_sim/fail", json.dumps(fault).encode())
        urllib.request.urlopen(request, timeout=5).read()


def state(router: RouterProcess) -> dict[str, Any]:
    """Return the first event of the live feed."""
    with urllib.request.urlopen(f"{router.admin_url}/admin/live", timeout=10) as feed:
        for line in feed:
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
    return {}


class Seen(NamedTuple):
    alert_s: float | None
    """Seconds from the fault to the alert with the expected cause."""
    cause: str
    alert: str
    finding: dict[str, Any]
    hit_before: float
    """Of the five minutes before the fault."""
    hit_after: float
    """Of the last five minutes of the run, most of which were before the fault."""
    drop_gpu_s: float
    """Cost by the drop below the baseline."""
    finding_gpu_s: float
    """Cost by the prompt doctor's finding."""
    log: list[str]


async def live(
    scenario: str, data: Path, planned: Sequence[Planned], fault_s: float, seconds: float, first_port: int
) -> Seen:
    blocks = BLOCKS.get(scenario)
    with tempfile.TemporaryDirectory() as folder, Children() as children:
        engines = []
        for number in range(NODES):
            port = free_port(first_port + 20 * number)
            engines.append(await asyncio.to_thread(Engine, children, data, blocks, port, free_port(port + 10)))
        tables: dict[str, Any] = {
            "nodes": [
                {
                    "name": f"gpu-{number}", "url": f"http://127.0.0.1:{engine.port}",
                    "kv_events": f"tcp://127.0.0.1:{engine.events_port}",
                }
                for number, engine in enumerate(engines)
            ],
            "models": [{"name": "sim", "tokenizer": str(data / TOKENIZER)}],
            "routing": {"policy": "price"},
        }  # fmt: skip
        router = await start_router(children, Path(folder), free_port(first_port + 200), tables)
        started_s = time.monotonic()
        failures: list[str] = []
        tasks = [asyncio.create_task(_send(router, one, fault_s, started_s, failures)) for one in planned]
        watch = asyncio.create_task(_watch(router, scenario, started_s + fault_s))
        await asyncio.sleep(max(0.0, started_s + fault_s - time.monotonic()))
        if scenario == "small_cache":
            assert blocks is not None
            for engine in engines:
                await asyncio.to_thread(engine.restart, blocks // 2)
        elif scenario == "lost_events":
            for engine in engines:
                engine.fail(mode="drop_events", share=0.5)
        await asyncio.sleep(max(0.0, started_s + seconds - time.monotonic()))
        await asyncio.gather(*tasks)
        await asyncio.sleep(7.0)
        watch.cancel()
        seen: Seen = await _result(router, watch)
        if failures:
            print(f"{scenario}: {len(failures)} requests failed: {failures[0]}")
        return seen._replace(log=[line for line in router.child.stderr_text().splitlines() if "hit_rate" in line])


async def _send(router: RouterProcess, one: Planned, fault_s: float, started_s: float, failures: list[str]) -> None:
    await asyncio.sleep(max(0.0, started_s + one.at_s - time.monotonic()))
    body = json.dumps(one.faulty if one.at_s >= fault_s else one.healthy).encode()
    headers = {"Content-Type": "application/json"}
    try:
        await send_streaming(router.url, "/v1/chat/completions", body, headers, 120.0)
    except (RequestFailed, RequestRefused) as error:
        failures.append(str(error))


class _Watched:
    alert_s: float | None = None
    cause = ""
    alert = ""
    before: dict[str, Any] | None = None


_watched: dict[str, _Watched] = {}


async def _watch(router: RouterProcess, scenario: str, fault_at_s: float) -> None:
    seen = _watched[router.url] = _Watched()
    while True:
        await asyncio.sleep(2.0)
        found = await asyncio.to_thread(state, router)
        now_s = time.monotonic()
        if now_s < fault_at_s:
            seen.before = found
            for alert in found["alerts"]:
                print(f"{scenario}: early alert {alert['title']}: {alert['cause']}", flush=True)
            continue
        page = await asyncio.to_thread(_metrics, router)
        causes = re.findall(r'hit_ratio_dropped\{[^}]*cause="(\w+)"\} 1', page)
        ids = [alert["id"] for alert in found["alerts"]]
        causes += [one for one in ids if one in ("kv_events_lost", "kv_events_missing")]
        matches = EXPECTED[scenario] in causes
        if matches and seen.alert_s is None:
            seen.alert_s = now_s - fault_at_s
            seen.cause = EXPECTED[scenario]
            alert = next(one for one in found["alerts"] if one["id"].startswith(("hit_rate_dropped", "kv_events")))
            seen.alert = f"{alert['title']}. {alert['cause']}"
            print(f"{scenario}: {seen.alert_s:.0f} s: {seen.alert}", flush=True)
        elif causes and not seen.cause:
            print(f"{scenario}: {now_s - fault_at_s:.0f} s: {causes}", flush=True)


def _metrics(router: RouterProcess) -> str:
    with urllib.request.urlopen(f"{router.admin_url}/metrics", timeout=10) as page:
        return str(page.read().decode())


async def _result(router: RouterProcess, _watch: object) -> Seen:
    seen = _watched[router.url]
    end = await asyncio.to_thread(state, router)
    page = await asyncio.to_thread(_metrics, router)
    lost = re.findall(r"hit_ratio_lost_gpu_seconds_total\{[^}]*\} ([\d.e+-]+)", page)
    findings = end["prompts"]["findings"]
    before = seen.before or end
    return Seen(
        seen.alert_s, seen.cause, seen.alert, findings[0] if findings else {}, before["window"]["hit_ratio"] or 0.0,
        end["window"]["hit_ratio"] or 0.0, sum(map(float, lost)), findings[0]["lost_gpu_s"] if findings else 0.0, [],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, CHATS, TOKENIZER)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="repeatable (default: all)")
    parser.add_argument("--rate", type=float, default=2.5, help="requests per second (default: 2.5)")
    parser.add_argument("--before", type=float, default=270.0, help="seconds without the fault (default: 270)")
    parser.add_argument("--after", type=float, default=90.0, help="seconds with it (default: 90)")
    parser.add_argument("--seed", type=int, default=7, help="of the requests and their times (default: 7)")
    parser.add_argument("--replay-only", action="store_true", help="print what replay says and exit")
    parser.add_argument("--together", type=int, default=2, help="scenarios that run at the same time (default: 2)")
    add_record_option(parser)
    args = parser.parse_args()
    data_files(args.data, CHATS, TOKENIZER)
    with gzip.open(args.data / CHATS, "rt") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    report = Report()
    scenarios = args.scenario or SCENARIOS
    asyncio.run(_run(args, chats, scenarios, report))
    report.record(args.record)


async def _run(args: argparse.Namespace, chats: Sequence[Any], scenarios: Sequence[str], report: Report) -> None:
    tokenizer = ModelTokenizer(args.data / TOKENIZER)
    seconds = args.before + args.after
    plans = {name: plan(chats, name, args.rate, seconds, args.seed) for name in scenarios}
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in scenarios if name in CHANGED_PROMPTS]:
            planned, healthy, faulty = plans[name], Path(folder) / "healthy.jsonl", Path(folder) / "faulty.jsonl"
            write_trace(healthy, [(one.at_s, one.healthy) for one in planned], tokenizer)
            changed = [(one.at_s, one.faulty if one.at_s >= args.before else one.healthy) for one in planned]
            write_trace(faulty, changed, tokenizer)
            cost = costs[name] = replayed_cost(healthy, faulty)
            print(f"replay {name}: {len(planned)} requests, {cost.gpu_s:.1f} ± {cost.error_s:.1f} GPU s", flush=True)
    if args.replay_only:
        return
    limit = asyncio.Semaphore(args.together)
    load = load_average()

    async def one(number: int, name: str) -> Seen:
        async with limit:
            return await live(name, args.data, plans[name], args.before, seconds, 21_000 + 400 * number)

    results = await asyncio.gather(*(one(number, name) for number, name in enumerate(scenarios)))
    report.value("load_average", load)
    report.value("seed", args.seed)
    report.table("faults", "fault", "hit rate before", "after", "alert after", "cause", "the router says")
    for name, seen in zip(scenarios, results, strict=True):
        after = f"{seen.alert_s:.0f} s" if seen.alert_s is not None else "never"
        report.row(name, f"{seen.hit_before:.0%}", f"{seen.hit_after:.0%}", after, seen.cause, seen.alert)
        report.value(f"{name} alert s", round(seen.alert_s or -1))
    report.table("cost", "fault", "position", "replay: GPU s", "alert: GPU s", "", "prompt doctor: GPU s", "")
    for name, seen in zip(scenarios, results, strict=True):
        if name in CHANGED_PROMPTS:
            cost = costs[name]
            place = f"{seen.finding.get('place', '')}, token {seen.finding.get('token', '')}"
            drop, finding = seen.drop_gpu_s / cost.gpu_s - 1.0, seen.finding_gpu_s / cost.gpu_s - 1.0
            report.row(
                name, place, f"{cost.gpu_s:.1f} ± {cost.error_s:.1f}", f"{seen.drop_gpu_s:.1f}", f"{drop:+.0%}",
                f"{seen.finding_gpu_s:.1f}", f"{finding:+.0%}",
            )  # fmt: skip
            report.value(f"{name} alert off", f"{drop:+.0%}")
            report.value(f"{name} doctor off", f"{finding:+.0%}")
    for name, seen in zip(scenarios, results, strict=True):
        print(name, *seen.log, sep="\n    ")


if __name__ == "__main__":
    main()
