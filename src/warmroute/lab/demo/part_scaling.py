"""Part 2 of the demo: a load that rises and falls, and a fleet that follows it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.lab.demo.processes import Children, RouterProcess, free_port, start_router
from warmroute.lab.engine.server import STOP_EVENT
from warmroute.lab.load import (
    ConversationHistory,
    RequestFailed,
    RequestRefused,
    build_request,
    chat_messages,
    send_streaming,
)
from warmroute.lab.summary import percentile
from warmroute.lab.workloads.generators import Rag
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.scaling.provisioner import MachineState, ProvisionerError
from warmroute.scaling.provisioners.process import ProcessProvisioner

# Sends requests at a rate that may change, and counts their outcomes. Requests do not wait for each other.

OUTPUT_TOKENS = 60
TIMEOUT_S = 60.0
RECENT_S = 5.0
RATE_CHECK_S = 0.2
"""Maximum time until a changed rate takes effect."""


class VariableLoad:
    """Questions about common documents, at `rate` requests per second."""

    def __init__(self, url: str, model: str = "sim", seed: int = 1) -> None:
        self._url = url
        self._model = model
        self._random = Random(seed)
        self._prompts = Rag(output_tokens=OUTPUT_TOKENS).generate(Random(f"{seed} prompts"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._recent: deque[tuple[float, float]] = deque()
        """When a response ended (s), and its time to first token (ms)."""
        self.rate = 0.0
        self.stopped = False
        """Set it to send no more requests."""
        self.sent = 0
        self.completed = 0
        """Responses with all tokens of the request."""
        self.truncated = 0
        """Responses with fewer tokens."""
        self.failed: Counter[str] = Counter()
        """Requests without a complete response, by reason."""
        self.ttft_ms: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def recent_ttft_ms(self) -> float | None:
        """Return the median of the last seconds, or None without responses."""
        self._drop_old()
        times = sorted(ms for _, ms in self._recent)
        return times[len(times) // 2] if times else None

    async def run(self) -> None:
        """Send requests until `stopped` is set, then wait for all responses."""
        try:
            await self._send_all()
            while self._tasks:
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        until_next = self._random.expovariate(1.0)  # in mean intervals, so that it does not depend on the rate
        last_s = loop.time()
        while not self.stopped:
            await asyncio.sleep(min(RATE_CHECK_S, until_next / self.rate) if self.rate else RATE_CHECK_S)
            now_s = loop.time()
            until_next -= self.rate * (now_s - last_s)
            last_s = now_s
            while until_next <= 0:
                until_next += self._random.expovariate(1.0)
                task = loop.create_task(self._send(next(self._prompts)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send(self, prompt: WorkloadPrompt) -> None:
        path, body = build_request(prompt, chat_messages(prompt, ConversationHistory()), self._model, "chat")
        self.sent += 1
        try:
            response = await send_streaming(self._url, path, body, {}, TIMEOUT_S)
        except (RequestRefused, RequestFailed) as reason:
            self.failed[str(reason)] += 1
            return
        if response.output_tokens == prompt.output_tokens and response.times_s:
            self.completed += 1
        else:
            self.truncated += 1
        self.prompt_tokens += response.prompt_tokens
        self.cached_tokens += response.cached_tokens
        if response.times_s:
            self.ttft_ms.append(response.ttft_ms)
            self._recent.append((time.monotonic(), response.ttft_ms))
            self._drop_old()

    def _drop_old(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - RECENT_S:
            self._recent.popleft()


# A router that autoscales simulated engines on this machine. When its context ends, all its processes have ended.

STARTING_STATES = ("requested", "booting", "loading", "warming")
STOPPING_STATES = ("draining", "terminating")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.25

_DECISION = re.compile(r'scaling_decision nodes=(\d+) desired_nodes=(\d+) reason=("(?:[^"\\]|\\.)*"|\S+)')
_STOP = re.compile(rf"{STOP_EVENT} requests_in_flight=(\d+)")


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    min_nodes: int = 2
    max_nodes: int = 5
    profile: str = "l4-8b"
    speed: float = 4.0
    """The engines' speed. It shortens the demo to about a minute."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the fleet, as the router's admin API reports it."""

    serving: int
    starting: int
    stopping: int
    waiting_requests: int
    reasons: tuple[str, ...]
    """The reasons of the last scaling decision."""

    @property
    def is_stable(self) -> bool:
        return not self.starting and not self.stopping


class ScalingChange(msgspec.Struct, frozen=True):
    """A scaling decision that the router logged."""

    nodes: int
    desired_nodes: int
    reason: str


class AutoscaledFleet:
    def __init__(self, children: Children, folder: Path, port: int, options: FleetOptions) -> None:
        """`folder`: an empty directory for configuration, logs and process states."""
        self._children = children
        self._folder = folder
        self._port = port
        self.options = options
        command = [sys.executable, "-m", "warmroute.lab.demo.die_with_parent", str(os.getpid())]
        command += [str(folder / "engine-{token}.log"), "engine", "--port", "{port}", "--profile", options.profile]
        command += ["--speed", f"{options.speed:g}", "--events-port", "0", "--replay-port", "0"]
        self._provisioner = ProvisionerConfig(
            kind="process",
            deployment=f"demo-{os.getpid()}",
            gpu="L4",
            usd_per_hour=0.7,
            port=free_port(20_000 + os.getpid() % 10_000),
            command=tuple(command),
            state_dir=str(folder / "processes"),
            stop_grace_s=5.0,
        )
        self.router: RouterProcess

    async def __aenter__(self) -> AutoscaledFleet:
        """Start the router and wait until `min_nodes` engines serve. Raises ConfigError."""
        try:
            self.router = await start_router(self._children, self._folder, self._port, self._router_config())
            await self._wait_for_min_nodes()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._stop()

    def _router_config(self) -> dict[str, Any]:
        settings = ("kind", "deployment", "gpu", "usd_per_hour", "port", "command", "state_dir")
        return {
            "scaling": {
                "enabled": True,
                "min_nodes": self.options.min_nodes,
                "max_nodes": self.options.max_nodes,
                "interval_s": 1.0,
                "stable_window_s": 10.0,
                "panic_window_s": 4.0,
                "trend_window_s": 0.0,
                "cooldown_up_s": 3.0,
                "cooldown_down_s": 8.0,
            },
            "scaling.replay": {"enabled": False},  # a minute has too little traffic
            "prompts": {"remote_tokenize": True},
            "provisioners": [{name: getattr(self._provisioner, name) for name in settings}],
        }

    async def _wait_for_min_nodes(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (await self.status()).serving < self.options.min_nodes:  # noqa: ASYNC110 (polls over HTTP)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ConfigError(
                f"{self.options.min_nodes} engines were not serving within {START_TIMEOUT_S:g} s"
            ) from None

    async def status(self) -> FleetStatus:
        """Raises ConfigError if the router does not answer."""
        scaling = await self.router.admin_get("/admin/scaling")
        states = Counter(node["state"] for node in scaling["nodes"])
        last = scaling["last_decision"]
        return FleetStatus(
            serving=states["serving"],
            starting=sum(states[state] for state in STARTING_STATES),
            stopping=sum(states[state] for state in STOPPING_STATES),
            waiting_requests=scaling["waiting_requests"],
            reasons=tuple(last["reasons"]) if last else (),
        )

    def changes(self) -> list[ScalingChange]:
        """Return the scaling decisions in the router's log."""
        found = _DECISION.findall(self.router.child.stderr_text())
        return [
            ScalingChange(int(nodes), int(desired), msgspec.json.decode(reason) if reason[0] == '"' else reason)
            for nodes, desired, reason in found
        ]

    def requests_at_stop(self) -> dict[str, int]:
        """Return how many requests each stopped engine still had, from the engines' logs."""
        found = {file.stem: _STOP.search(file.read_text()) for file in self._folder.glob("engine-*.log")}
        return {name.removeprefix("engine-"): int(match[1]) for name, match in found.items() if match}

    async def _stop(self) -> None:
        """Stop the router first, because it would start new engines, then its engines, which outlive it."""
        if hasattr(self, "router") and not self.router.child.has_ended():
            await asyncio.to_thread(self._children.end, self.router.child)
        provisioner = ProcessProvisioner(self._provisioner)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                machines = await provisioner.status()
                running = [machine for machine in machines if machine.state is not MachineState.TERMINATED]
                await asyncio.gather(*(provisioner.terminate(machine) for machine in running))
        except (ProvisionerError, TimeoutError) as error:  # the engines end with this process in any case
            raise ConfigError(f"cannot stop the demo's engines: {error or 'timeout'}") from None
        finally:
            await provisioner.close()


# Part 2 of the demo: a load that rises and falls, and a fleet that follows it.
#
#     low     a low rate for the smallest fleet
#     rise    the rate rises; the router adds engines up to the largest fleet
#     peak    the largest fleet at the highest rate
#     fall    almost no requests; the router removes engines down to the smallest fleet
#
# `rise` and `fall` end when the fleet has its size, or after a timeout. How long that takes depends on the machine.

STATUS_TRIES = 3
"""A busy machine may miss a status request. The demo fails after this many in a row."""

Phase = Literal["low", "rise", "peak", "fall"]


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of the load. Rates are requests per second."""

    low_rate: float = 2.0
    peak_rate: float = 14.0
    idle_rate: float = 1.0
    """The rate of the phase `fall`."""
    low_s: float = 4.0
    ramp_s: float = 8.0
    """Time in which the rate rises to its peak."""
    peak_s: float = 5.0
    timeout_s: float = 60.0
    """Maximum duration of `rise` and of `fall`."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the load and the fleet at one time."""

    at_s: float
    phase: Phase
    rate: float
    fleet: FleetStatus
    in_flight: int
    ttft_ms: float | None


class ScalingResult(msgspec.Struct, kw_only=True):
    samples: list[Sample] = msgspec.field(default_factory=list)
    changes: list[ScalingChange] = msgspec.field(default_factory=list)
    requests_at_stop: dict[str, int] = msgspec.field(default_factory=dict)
    """How many requests each removed engine still had when it was stopped."""

    @property
    def max_serving(self) -> int:
        return max((sample.fleet.serving for sample in self.samples), default=0)

    @property
    def final_serving(self) -> int:
        return self.samples[-1].fleet.serving if self.samples else 0

    @property
    def duration_s(self) -> float:
        return self.samples[-1].at_s if self.samples else 0.0


class ScalingDemo:
    def __init__(
        self,
        fleet: AutoscaledFleet,
        load: VariableLoad,
        plan: LoadPlan,
        show: Callable[[Sample], None] = lambda _sample: None,
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._plan = plan
        self._show = show
        self._started_s = 0.0
        self._result = ScalingResult()

    async def run(self) -> ScalingResult:
        """Run all phases and wait for all responses. Raises ConfigError if the router ends."""
        self._started_s = asyncio.get_running_loop().time()
        sending = asyncio.get_running_loop().create_task(self._load.run())
        try:
            await self._run_phases()
            self._load.stopped = True
            await sending
        finally:
            sending.cancel()
        self._result.changes = self._fleet.changes()
        self._result.requests_at_stop = self._fleet.requests_at_stop()
        return self._result

    async def _run_phases(self) -> None:
        plan, options = self._plan, self._fleet.options
        await self._run_phase("low", lambda _s: plan.low_rate, plan.low_s)
        await self._run_phase("rise", self._rising_rate, plan.timeout_s, lambda f: f.serving == options.max_nodes)
        await self._run_phase("peak", lambda _s: plan.peak_rate, plan.peak_s)
        await self._run_phase(
            "fall", lambda _s: plan.idle_rate, plan.timeout_s, lambda f: f.serving == options.min_nodes and f.is_stable
        )

    def _rising_rate(self, phase_s: float) -> float:
        plan = self._plan
        return plan.low_rate + (plan.peak_rate - plan.low_rate) * min(1.0, phase_s / plan.ramp_s)

    async def _run_phase(
        self,
        phase: Phase,
        rate: Callable[[float], float],
        limit_s: float,
        is_over: Callable[[FleetStatus], bool] = lambda _fleet: False,
    ) -> None:
        """`rate`: takes the seconds since the phase began. `is_over`: ends the phase before its limit."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while (phase_s := loop.time() - started_s) < limit_s:
            self._load.rate = rate(phase_s)
            fleet = await self._fleet_status()
            sample = Sample(
                at_s=loop.time() - self._started_s,
                phase=phase,
                rate=self._load.rate,
                fleet=fleet,
                in_flight=self._load.in_flight,
                ttft_ms=self._load.recent_ttft_ms(),
            )
            self._result.samples.append(sample)
            self._show(sample)
            if is_over(fleet):
                return
            await asyncio.sleep(POLL_S)

    async def _fleet_status(self) -> FleetStatus:
        for _ in range(STATUS_TRIES - 1):
            try:
                return await self._fleet.status()
            except ConfigError:
                await asyncio.sleep(POLL_S)
        return await self._fleet.status()


# Part 2 of the demo on a terminal: a live view, then a table, two sparklines and the router's reasons.

LEVELS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 50
BAR_WIDTH = 30
PHASES: dict[Phase, str] = {"low": "low load", "rise": "rising load", "peak": "peak load", "fall": "almost no load"}


def introduce(console: Console, options: FleetOptions) -> None:
    console.print(
        f"[bold]2. Autoscaling[/]\n"
        f"The load rises and falls. Warmroute starts and stops engines to match it, from\n"
        f"{options.min_nodes} to {options.max_nodes} and back. Here engines are processes ({options.profile}, "
        f"{options.speed:g} times as fast as\nreal ones). In production they are cloud machines or Kubernetes pods.\n",
        highlight=False,
    )


class LiveView:
    """Shows the current sample. Without a terminal, it prints a line for each change."""

    def __init__(self, console: Console, options: FleetOptions, plan: LoadPlan) -> None:
        self._console = console
        self._options = options
        self._plan = plan
        self._samples: list[Sample] = []
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, sample: Sample) -> None:
        previous = self._samples[-1] if self._samples else None
        self._samples.append(sample)
        if self._console.is_terminal:
            self._live.update(self._table(sample))
        elif previous is None or (previous.phase, _engines(previous)) != (sample.phase, _engines(sample)):
            self._console.print(
                f"{sample.at_s:5.1f} s  {PHASES[sample.phase]:<14}  {sample.rate:4.1f} requests/s  {_engines(sample)}",
                highlight=False,
            )

    def _table(self, sample: Sample) -> Table:
        fleet = sample.fleet
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        filled = round(BAR_WIDTH * sample.rate / self._plan.peak_rate)
        bar = Text("━" * filled, "magenta").append("━" * (BAR_WIDTH - filled), "bright_black")
        table.add_row("load", bar.append(f"  {sample.rate:.1f} requests/s, {PHASES[sample.phase]}", "default"))
        lamps = Text("● " * fleet.serving, "green")
        lamps.append("◌ " * fleet.starting, "yellow").append("● " * fleet.stopping, "red")
        unused = max(0, self._options.max_nodes - fleet.serving - fleet.starting - fleet.stopping)
        table.add_row("engines", lamps.append("· " * unused, "bright_black").append(f" {_engines(sample)}", "default"))
        ttft = "" if sample.ttft_ms is None else f", TTFT {sample.ttft_ms:,.0f} ms"
        table.add_row("requests", f"{sample.in_flight} in flight, {fleet.waiting_requests} queued{ttft}")
        table.add_row("", f"{_rate_line(self._samples, self._plan)}  requests/s")
        table.add_row("", f"{_engine_line(self._samples, self._options)}  engines, {sample.at_s:.0f} s")
        table.add_row("reason", "; ".join(fleet.reasons) or "the fleet has the right size")
        return table


def conclude(
    console: Console, options: FleetOptions, plan: LoadPlan, load: VariableLoad, result: ScalingResult
) -> bool:
    """Show the results. Return whether they are as they should be."""
    busy = sum(1 for requests in result.requests_at_stop.values() if requests)
    failed = sum(load.failed.values())
    followed = result.max_serving == options.max_nodes and result.final_serving == options.min_nodes
    ttft_ms = [percentile(sorted(load.ttft_ms), fraction) or 0.0 for fraction in (0.5, 0.9)]
    rows = [
        ("requests completed", f"{load.completed} of {load.sent}", load.completed == load.sent),
        ("requests failed / truncated", f"{failed} / {load.truncated}", not failed and not load.truncated),
        ("engines, maximum / at the end", f"{result.max_serving} / {result.final_serving}", followed),
        ("engines stopped with requests", f"{busy} of {len(result.requests_at_stop)}", not busy),
        ("time to first token, p50 / p90", f"{ttft_ms[0]:,.0f} / {ttft_ms[1]:,.0f} ms", True),
        ("cached prompt tokens", f"{load.cached_tokens / max(1, load.prompt_tokens):.1%}", True),
        (f"engine time / with {options.max_nodes} all the time", _engine_time(options, result), True),
    ]
    table = Table(title="Results", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value, good in rows:
        table.add_row(name, value if good else f"[red]{value}")
    console.print(table)
    for reason, count in load.failed.items():
        console.print(f"  {count} × {reason}", style="red", markup=False)
    rates, engines = _rate_line(result.samples, plan), _engine_line(result.samples, options)
    console.print(f"{rates}  requests/s, up to {plan.peak_rate:g}", highlight=False)
    console.print(f"{engines}  engines, in {result.duration_s:.0f} s\n", highlight=False)
    console.print("Scaling decisions, with the router's reasons:")
    for change in result.changes:
        text = Text(f"{change.nodes} → {change.desired_nodes} engines: {change.reason}", "cyan")
        console.print(Padding(text, (0, 0, 0, 2), expand=False))
    if not followed:
        console.print(
            f"The fleet did not grow to {options.max_nodes} engines and shrink to {options.min_nodes} in time. "
            "This machine may be busy.",
            style="red",
        )
    return all(good for _, _, good in rows)


def _engines(sample: Sample) -> str:
    fleet = sample.fleet
    parts = [f"{fleet.serving} serving"]
    parts += [f"{fleet.starting} starting"] if fleet.starting else []
    parts += [f"{fleet.stopping} stopping"] if fleet.stopping else []
    return ", ".join(parts)


def _engine_time(options: FleetOptions, result: ScalingResult) -> str:
    """Add up the time of all engines, including those that start or stop."""
    used_s = previous_s = 0.0
    for sample in result.samples:
        fleet = sample.fleet
        used_s += (fleet.serving + fleet.starting + fleet.stopping) * (sample.at_s - previous_s)
        previous_s = sample.at_s
    return f"{used_s:.0f} / {options.max_nodes * result.duration_s:.0f} s"


def _rate_line(samples: Sequence[Sample], plan: LoadPlan) -> str:
    return sparkline([sample.rate for sample in samples], [sample.at_s for sample in samples], plan.peak_rate)


def _engine_line(samples: Sequence[Sample], options: FleetOptions) -> str:
    serving = [sample.fleet.serving for sample in samples]
    return sparkline(serving, [sample.at_s for sample in samples], options.max_nodes)


def sparkline(values: Sequence[float], at_s: Sequence[float], highest: float, width: int = SPARKLINE_WIDTH) -> str:
    """Draw one character per time interval: the largest value in it, or the previous one if it has none."""
    if not values:
        return ""
    width = min(width, len(values))
    interval_s = (at_s[-1] - at_s[0]) / width or 1.0
    heights: list[float | None] = [None] * width
    for value, s in zip(values, at_s, strict=True):
        index = min(width - 1, int((s - at_s[0]) / interval_s))
        heights[index] = max(value, heights[index] or 0.0)
    drawn, last = [], values[0]
    for height in heights:
        last = last if height is None else height
        drawn.append(LEVELS[min(len(LEVELS) - 1, max(0, round(last / highest * len(LEVELS)) - 1))])
    return "".join(drawn)
