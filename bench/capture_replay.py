"""Does the replay of a capture have the hit rate that was measured live?

    python bench/capture_replay.py                       `make run`'s load, and chats with longer answers
    python bench/capture_replay.py --data DIR            … and public traces
    python bench/capture_replay.py --nginx               … and chats behind nginx, which mirrors them

Simulated engines run as processes behind `warmroute serve` with `[capture]`, and clients send them real requests. The
capture is then replayed with the same policy on the same fleet. The replay breaks ties between nodes at random, as the
router does: `replayed` is the median of five seeds, and the range of all of them is beside it. `measured` is what the
engines reported in their responses.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from record import Report, add_record_option, load_average
from request_path import cost_us

from warmroute.app.capture import CapturedCall, CaptureFile, CaptureRun, TrafficCapture
from warmroute.config import Capture, Health, NodeConfig
from warmroute.core.calls import Call
from warmroute.core.fleet import Fleet as WarmrouteFleet
from warmroute.core.messages import CallHistory, Outcome, RoutingRequest
from warmroute.core.traffic import Counters
from warmroute.edge.arrival import Kept
from warmroute.lab.demo import part_routing
from warmroute.lab.demo.part_routing import RoutingComparison
from warmroute.lab.demo.processes import Child, Children, free_port, send_request, start_router
from warmroute.lab.engine.timing import profile
from warmroute.lab.load import LoadOptions, LoadRun
from warmroute.lab.replay_setup import PolicySpec, parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.sizing import LatencyLimits, nodes_needed
from warmroute.lab.summary import Measured, measure
from warmroute.lab.workloads import Trace, parse_workload
from warmroute.prompt.prompt import exact_prompt

SEEDS = 5
CHATS = "multi_turn_chat systems=4 system_tokens=400 turns=4 message_tokens=120 output_tokens=150 think_s=2"
TRACES = (
    ("public trace of questions about papers", "mooncake_arxiv_first1000", 3.0, 300),
    ("public trace of coding sessions, read as text", "weka_60sessions_mooncake_format", 1.0, 150),
)
"""Name, file, requests per second and number of requests. Prompts over 256 KB are matched by their text."""
NGINX = """\
daemon off; pid FOLDER/nginx.pid; error_log FOLDER/error.log;
events { worker_connections 1024; }
http {
  access_log off; client_max_body_size 32m;
  client_body_temp_path FOLDER/body; proxy_temp_path FOLDER/proxy;
  fastcgi_temp_path FOLDER/fastcgi; uwsgi_temp_path FOLDER/uwsgi; scgi_temp_path FOLDER/scgi;
  upstream engines { ENGINES }
  server {
    listen 127.0.0.1:PORT;
    location / {
      mirror /warmroute-capture;
      proxy_pass http://engines;
      proxy_buffering off;
      proxy_read_timeout 600s;
    }
    location = /warmroute-capture {
      internal;
      proxy_pass http://127.0.0.1:CAPTURE$request_uri;
      proxy_connect_timeout 200ms;
      proxy_read_timeout 1s;
    }
  }
}
"""


class Fleet(msgspec.Struct, frozen=True):
    """Engines that run live and in the replay alike."""

    nodes: int
    profile: str
    blocks: int
    speed: float = 1.0
    """Engines that are faster than real change what the router decides: its own delays then weigh more."""
    max_model_len: int = 32_768

    def flags(self) -> list[str]:
        flags = ["--port", "0", "--profile", self.profile, "--blocks", str(self.blocks), "--speed", f"{self.speed:g}"]
        flags += ["--max-model-len", str(self.max_model_len), "--events-port", "0", "--replay-port", "0"]
        return flags

    def specs(self) -> tuple[NodeSpec, ...]:
        return tuple(
            NodeSpec(f"node-{at}", profile(self.profile), blocks=self.blocks) for at in range(1, self.nodes + 1)
        )


DEMO_FLEET = Fleet(part_routing.ENGINES, part_routing.PROFILE, part_routing.BLOCKS)
CHAT_FLEET = Fleet(4, "l4-8b", 1500)
TRACE_FLEET = Fleet(4, "2xh100-32b", 20_000, max_model_len=1_000_000)


class CapturedComparison(RoutingComparison):
    """`make run`'s comparison with a capture of each policy."""

    def __init__(self, children: Children, folder: Path, speed: float) -> None:
        super().__init__(children, folder, speed)
        self.captures = folder

    def _router_config(self, policy: str) -> dict[str, Any]:
        return {**super()._router_config(policy), "capture": {"directory": str(self.captures / f"demo-{policy}")}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="directory of public traces")
    parser.add_argument("--nginx", action="store_true", help="mirror the chats with nginx, too")
    parser.add_argument("--chats", type=int, default=200, metavar="N", help="requests of the chats (default: 200)")
    add_record_option(parser)
    args = parser.parse_args(arguments)
    report = Report()
    report.value("load", load_average())
    _cost(report)
    report.table(
        "hit_rates", "load", "policy", "requests", "measured", "replayed", "range", "difference (points)",
        "TTFT p50 measured", "replayed ", "bytes per request",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="warmroute-capture-") as name:
        folder = Path(name)
        asyncio.run(_demo(folder, report))
        _plan(folder / "demo-price", report)
        for policy in ("round_robin", "price"):
            asyncio.run(_chats(folder, policy, args.chats, report))
        if args.nginx:
            asyncio.run(_mirrored_chats(folder, args.chats, report))
        if args.data:
            for load, file, rate, limit in TRACES:
                trace = args.data / "traces" / f"{file}.jsonl.gz"
                asyncio.run(_live(folder, TRACE_FLEET, "price", [str(trace)], "tokens", rate, limit, folder / file))
                _compare(load, folder / file, TRACE_FLEET, "price", report)
    report.record(args.record)
    return 0


async def _demo(folder: Path, report: Report) -> None:
    with Children() as children:
        comparison = CapturedComparison(children, folder, 1.0)
        await comparison.start_engines()
        await comparison.run(free_port(18_300), lambda _policy: None)
        await asyncio.sleep(1.0)  # the last requests are written
        await asyncio.to_thread(comparison.stop)
    for policy in part_routing.POLICIES:
        _compare(f"`make run`, {policy}", folder / f"demo-{policy}", DEMO_FLEET, policy, report)


async def _chats(folder: Path, policy: str, limit: int, report: Report) -> None:
    capture = folder / f"chats-{policy}"
    await _live(folder, CHAT_FLEET, policy, CHATS.split(), "chat", 3.0, limit, capture)
    _compare("chats", capture, CHAT_FLEET, policy, report)


async def _live(
    folder: Path, fleet: Fleet, policy: str, words: list[str], form: Any, rate: float, limit: int, capture: Path
) -> None:
    """Send a workload through a router with a capture."""
    with Children() as children:
        urls = await _start_engines(children, fleet)
        nodes = [{"url": url, "name": f"node-{number}"} for number, url in enumerate(urls, 1)]
        tables: dict[str, Any] = {
            "routing": {"policy": policy},
            "prompts": {"remote_tokenize": True},
            "capture": {"directory": str(capture)},
            "nodes": nodes,
        }
        router = await start_router(children, folder, free_port(18_400), tables)
        await _send(router.url, fleet, words, form, rate, limit)
        await asyncio.sleep(1.0)


async def _start_engines(children: Children, fleet: Fleet) -> list[str]:
    engines: list[Child] = [children.start("engine", *fleet.flags()) for _ in range(fleet.nodes)]
    return [msgspec.json.decode(await asyncio.to_thread(one.first_line))["url"] for one in engines]


async def _send(url: str, fleet: Fleet, words: list[str], form: Any, rate: float, limit: int) -> dict[str, Any]:
    prompts = parse_workload(words).arrivals(1, rate, 1, limit)
    run = LoadRun(LoadOptions(url=url, form=form, limit=limit, speed=fleet.speed), prompts)
    result = await run.run()
    if result["failed"] or result["rejected"]:
        print(f"{result['failed']} requests failed: {result['errors']}, {run.error_messages}", file=sys.stderr)
    return result


async def _mirrored_chats(folder: Path, limit: int, report: Report) -> None:
    """nginx balances the engines round robin and mirrors each request. The engines' reports go to the clients only."""
    if shutil.which("nginx") is None:
        print("nginx is not installed", file=sys.stderr)
        return
    capture = folder / "mirrored.jsonl"
    with Children() as children:
        urls = await _start_engines(children, CHAT_FLEET)
        listen, port = free_port(18_500), free_port(18_600)
        mirror = children.start("capture", "--listen", str(listen), "--out", str(capture))
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
        config = NGINX.replace("ENGINES", servers).replace("FOLDER", str(folder)).replace("PORT", str(port))
        (folder / "nginx.conf").write_text(config.replace("CAPTURE", str(listen)))
        command = ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]
        nginx = await asyncio.to_thread(subprocess.Popen, command)
        try:
            for one in (listen, port):
                await _until_healthy(f"http://127.0.0.1:{one}/health")
            live = await _send(f"http://127.0.0.1:{port}", CHAT_FLEET, CHATS.split(), "chat", 3.0, limit)
            await asyncio.sleep(1.0)
        finally:
            nginx.terminate()
            nginx.wait()
        await asyncio.to_thread(children.end, mirror)
    _compare("chats, mirrored by nginx, text", capture, CHAT_FLEET, "round_robin", report, live)


async def _until_healthy(url: str) -> None:
    while True:
        try:
            if (await send_request("GET", url))[0] == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)


def _compare(
    load: str, capture: Path, fleet: Fleet, policy: str, report: Report, live: dict[str, Any] | None = None
) -> None:
    trace = Trace(capture, speed=1.0 / fleet.speed)
    past = measure(trace)
    assert past is not None, f"{capture} is empty"
    runs = [replay(_setup(trace, fleet, parse_policy(policy), seed)) for seed in range(1, SEEDS + 1)]
    rates = sorted(run["hit_rate"] for run in runs)
    measured, ttft_ms = _measured(past, fleet, live)
    replayed = median(rates)
    files = [capture] if capture.is_file() else list(capture.iterdir())
    report.row(
        load.removesuffix(f", {policy}"), policy, past.requests, f"{measured:.1%}", f"{replayed:.1%}",
        f"{rates[0]:.1%} to {rates[-1]:.1%}", f"{100 * (replayed - measured):+.1f}",
        f"{ttft_ms:,.0f} ms", f"{median(run['ttft_ms']['p50'] for run in runs):,.0f} ms",
        f"{sum(file.stat().st_size for file in files) / past.requests:,.0f}",
    )  # fmt: skip


def _measured(past: Measured, fleet: Fleet, live: dict[str, Any] | None) -> tuple[float, float]:
    """Return the hit rate, and the median TTFT at speed 1. A mirror does not see them: the clients do."""
    if live is not None:
        return live["hit_rate"], live["ttft_ms"]["p50"]
    run = past.run("")
    assert run is not None, "no response reported its cached tokens"
    return run["hit_rate"], run["ttft_ms"]["p50"] * fleet.speed


def _cost(report: Report) -> None:
    """What a captured request of 8,000 tokens costs: on the event loop, and in the thread that writes it."""
    capture = TrafficCapture(Capture(), Counters())
    capture.start(CaptureFile(Path("/dev/null"), 1 << 62))
    prompt = exact_prompt(bytes(4 * 8000))
    request = RoutingRequest("m", arrived_s=time.monotonic() + 1e6)
    node = WarmrouteFleet(Health()).add(NodeConfig(url="http://127.0.0.1:8000"))
    call = Call(1, request)
    call.usage, call.outcome, call.ended_s = (8000, 7000, 200), Outcome.OK, request.arrived_s + 1
    call.end = (Outcome.OK, node, 1, 200, request.arrived_s + 0.5, call.ended_s)
    call.history = CallHistory()

    def on_loop() -> None:
        call.kept = Kept(body_bytes=32_000, prompt=prompt)
        capture.call_ended(call, 200.0)
        capture._pending.clear()
        capture._pending_bytes = 0

    ended = CapturedCall(request, b"", prompt, 32_000, "ok", request.arrived_s + 1, 200, False, (8000, 7000, 200))
    run = CaptureRun(16, 0.0)
    report.value("loop_us", f"{cost_us(on_loop):.1f}")
    report.value("thread_us", f"{cost_us(lambda: run.lines([ended])):.0f}")
    report.value("line_bytes", f"{len(run.lines([ended])):,}")


def _setup(trace: Trace, fleet: Fleet, policy: PolicySpec, seed: int) -> Setup:
    return Setup(workload=trace, nodes=fleet.specs(), policy=policy, conditions=Conditions(seed=seed))


def _plan(capture: Path, report: Report) -> None:
    """`warmroute plan` on the capture of `make run`: the nodes that each policy needs."""
    limits, started_s = LatencyLimits(ttft_p90_ms=1000.0), time.monotonic()
    for name in ("price", "round_robin"):
        policy = parse_policy(name)
        found = nodes_needed(_setup(Trace(capture), DEMO_FLEET, policy, 1), policy, limits, 64)
        report.value(f"plan_{name}", found.nodes if found.nodes is not None else "over 64")
    report.value("plan_seconds", round(time.monotonic() - started_s, 1))


if __name__ == "__main__":
    sys.exit(main())
