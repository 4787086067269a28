"""Core and the lab's edge in virtual time: the lab's own calendar, network and exchanges, and nodes whose engines do
nothing by themselves. What a script says of a node happens as if its engine had done it."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

import msgspec

from seam.player import Play
from seam.script import RETRIES_ITSELF, SETS_THE_CLOCK, Arrive, Happens, NodeSpec, Script, Tell
from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Health, Hedging, Pricing, Routing, from_table
from warmroute.core import messages
from warmroute.core.messages import Withdrawn
from warmroute.core.node import Node
from warmroute.lab.engine.timing import Profile, Timing
from warmroute.lab.request_flow import MODEL, SimulatedExchange
from warmroute.lab.simulated_node import Conditions, Island
from warmroute.lab.simulated_node import NodeSpec as SimulatedSpec
from warmroute.lab.simulated_router import PolicyListener
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World

NEVER_S: Final = 1e9
STARTS_MS: Final = 1_000_000.0
LATER_MS: Final = 0.25
"""A client leaves this much after the script's time: its call may have arrived at that time."""
PROFILE: Final = Profile(
    name="idle",
    timing=Timing(m=0, a=0, b=1.0, d=0, h=0, e=10.0, f=0, e2=0, f2=0, g=0, overhead_ms=0),
    kv_tokens=64_000,
    kv_bytes_per_token=1,
)


class _Recorded:
    """The core, and what crosses its door."""

    def __init__(self, brain: Any, stage: ReplayStage) -> None:
        self._brain, self._stage = brain, stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._brain, name)

    def handle(self, event: Any, now_s: float) -> Any:
        if isinstance(event, messages.Arrive):
            event.kept = event.id
        elif isinstance(event, Withdrawn):
            self._stage.withdrawn.append(("Withdrawn", event.id, event.try_))
        found = self._brain.handle(event, now_s)
        self._stage.heard += found
        for call in self._brain.ended:
            self._stage.calls[call.id] = call
        self._brain.ended.clear()
        return found


class _NoLimits:
    """Simulated tenants have none."""

    def taken(self, _now_s: float) -> dict[str, Any]:
        return {}


class ReplayStage:
    can = frozenset({RETRIES_ITSELF, SETS_THE_CLOCK})
    is_envoy = False

    def __init__(self) -> None:
        self.rate_limits = _NoLimits()
        self.heard: list[Any] = []
        """Commands since they were last asked for."""
        self.withdrawn: list[tuple[str, int, int]] = []
        self.calls: dict[int, Any] = {}
        self.exchanges: dict[str, SimulatedExchange] = {}
        self._new_prompts = count(1_000_000)
        self._leaves_ms: dict[str, float] = {}
        self._arrived: set[str] = set()

    async def open(self, script: Script) -> list[Node]:
        table = script.config
        streams = all(
            line.event.fields.get("streams", True) for line in script.lines if isinstance(line.event, Arrive)
        )  # fmt: skip
        islands = {spec.island: Island(0.0) for spec in script.nodes.values()} | {"local": Island(0.0)}
        conditions = Conditions(
            islands=islands, poll_interval_s=NEVER_S, first_byte_timeout_s=NEVER_S, streams=streams,
            attempts=table.get("upstream", {}).get("max_attempts", 0),
        )  # fmt: skip
        split = "always" if any(spec.role != "mixed" for spec in script.nodes.values()) else "by_price"
        config = msgspec.structs.replace(
            from_table({}),
            admission=AdmissionConfig(**table.get("admission", {})),
            hedging=Hedging(**table.get("hedging", {})),
            routing=Routing(**{"policy": "price", "seed": 3, **table.get("routing", {})}),
            price=Pricing(**{"split": split, **table.get("pricing", {})}),
        )
        self._admission = dict(table.get("admission", {}))
        self.world = world = World(
            [], conditions, config, listener=PolicyListener(),
            health=Health(**{"slow_start_s": 0.0, **table.get("health", {})}),
        )  # fmt: skip
        world.arrivals = 1  # so that the first call has the number 1
        world.calendar.run(until_ms=STARTS_MS)
        self.fleet, self.admission, self.flow = world.fleet, world.admission, world.requests
        self.admission.without_node.first_node_wait_s = script.first_node_wait_s
        self.counters = self.flow.counters
        self.flow.brain = _Recorded(self.flow.brain, self)  # type: ignore[assignment]
        times_ms = script.times_ms
        arrived_ms = {
            line.event.call: at_ms
            for line, at_ms in zip(script.lines, times_ms, strict=True)
            if isinstance(line.event, Arrive)
        }
        for line, at_ms in zip(script.lines, times_ms, strict=True):
            event = line.event
            if isinstance(event, Tell) and event.message == "Cancel" and event.call in arrived_ms:
                self._leaves_ms[event.call] = at_ms - arrived_ms[event.call] + LATER_MS
        self._outputs = {
            line.event.call: line.event.fields["usage"][2]
            for line in script.lines
            if isinstance(line.event, Tell) and line.event.message == "Ended" and line.event.fields["usage"]
        }
        return [self._add(f"n{number}", spec) for number, spec in enumerate(script.nodes.values())]

    def _add(self, name: str, spec: NodeSpec) -> Node:
        simulated = SimulatedSpec(
            name, PROFILE, spec.island, spec.role, spec.kv_connector, max_inflight=spec.max_inflight,
        )  # fmt: skip
        node = self.world.add(simulated).node
        self.world.hang(name)
        self.world.cache_view.add_node(name, [MODEL]).set_size(16, spec.cache_tokens)
        if spec.state == "up":
            self.fleet.check_passed(node, self.now_s)
        elif spec.state == "down":
            self.fleet.check_failed(node, self.now_s, "connection refused")
        return node

    async def close(self) -> None:
        pass

    # Time.

    @property
    def now_s(self) -> float:
        return self.world.calendar.now_s

    async def step(self, until_s: float, sends_due: bool = True) -> bool:
        self.world.calendar.run(until_ms=until_s * 1000.0)
        return False

    async def send_due(self) -> None:
        """The lab's own calendar does."""

    # Requests.

    async def arrive(self, play: Play, event: Arrive, on: Node | None) -> None:
        others = [node for node in self.fleet if on is not None and node is not on and not node.draining]
        for other in others:
            self.fleet.drain(other.name)
        fields, call = event.fields, event.call
        number = next(self._new_prompts) if event.prompt is None else event.prompt
        text = Segments().followed_by(segment_id("prompt", number), event.tokens)
        prompt = WorkloadPrompt(
            event.tokens, self._outputs.get(call, 10), text, session=fields.get("session_header", b""),
            priority=fields.get("priority", "normal"), tenant=fields.get("tenant", ""),
            patience_ms=self._leaves_ms.get(call),
        )  # fmt: skip
        assert play.id_of(call) == self.world.arrivals
        exchange = self.world.arrive(prompt)
        if exchange is not None:
            self.exchanges[call] = exchange
        for other in others:
            self.fleet.drain(other.name, False)
        if others:
            self.flow.fleet_changed()

    async def tell(self, play: Play, event: Tell) -> None:
        fields = event.fields
        if event.message == "Cancel":
            self._leave(event.call)
            return
        one = self.exchanges[event.call].tries[fields["try_"]]
        if event.message in ("Started", "FirstToken"):
            if event.call not in self._arrived:
                self._arrived.add(event.call)
                self.flow.first_token(one, 0)
        elif event.message == "Ended":
            if event.call not in self._arrived and one.exchange.request.streams:
                self.flow.first_token(one, 0)
            self.flow.answered(one)
        elif event.message == "Prefilled":
            usage = fields["usage"]
            self.flow.first_token(one, usage[1] if usage else 0)
            self.flow.answered(one)
        else:
            self.flow.failed(one, fields["status"], f"status {fields['status']}")

    def _leave(self, call: str) -> None:
        """The client has lost its patience by now."""
        exchange = self.exchanges.get(call)
        if exchange is None or exchange.ended:
            return
        if call in self._leaves_ms:
            self.world.calendar.run(until_ms=exchange.arrived_ms + self._leaves_ms[call])
        else:
            self._answer(call, exchange)

    def _answer(self, call: str, exchange: SimulatedExchange) -> None:
        """The script has ended: each call that is left gets its answer."""
        while not exchange.ended:
            live = [one for one in exchange.tries.values() if one.live]
            assert live, f"{call} still waits: let its client leave in the script"
            one = next((one for one in live if one.prefills), live[-1])
            if one.prefills or (call not in self._arrived and exchange.request.streams):
                self.flow.first_token(one, 0)
            self.flow.answered(one)

    async def happen(self, play: Play, event: Happens) -> None:
        fleet, now_s, what = self.fleet, self.now_s, event.what
        if what == "joins":
            spec = event.fields["spec"]
            play.joined(event.node, spec, self._add(event.node, spec))
        elif what == "reloads":
            self.admission.reconfigure(AdmissionConfig(**{**self._admission, **event.fields}))
        else:
            node = play.node(event.node)
            if what == "suspected":
                for _ in range(3):
                    fleet.check_timed_out(node, now_s)
            elif what == "refuses":
                fleet.check_failed(node, now_s, "connection refused")
            elif what == "check_times_out":
                fleet.check_timed_out(node, now_s)
            elif what == "comes_up":
                fleet.check_passed(node, now_s)
            elif what == "removed":
                self.world.remove(node.name)
            elif what in ("drained", "undrained"):
                fleet.drain(node.name, what == "drained")
            elif what == "reports":
                fields = event.fields
                node.update_load(fields["running"], fields["waiting"], fields["kv_usage"], now_s)
        self.flow.fleet_changed()

    async def commands(self) -> list[Any]:
        found, self.heard = self.heard, []
        return found

    def answers_withdraw(self) -> bool:
        return False

    def given_up(self) -> list[tuple[str, int, int]]:
        found, self.withdrawn = self.withdrawn, []
        return found

    # The end.

    async def check_answers(self, play: Play) -> None:
        assert not self.flow.inflight, "the lab has requests left"

    def ended(self) -> dict[int, Any]:
        return self.calls

    def unfinished(self) -> list[str]:
        return [f"call {call}" for call in self.flow.brain.open]
