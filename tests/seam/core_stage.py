"""The core alone: real nodes, router, admission and limits, and a clock that the script sets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import count
from math import inf
from typing import Any, Final

from seam.player import TENANT, Play, message_of
from seam.script import (
    EVERY_REQUEST,
    FAULTS,
    IS_ENVOY,
    LATE_ANSWERS,
    RETRIES_ITSELF,
    SETS_THE_CLOCK,
    TAKES_SUBSETS,
    Arrive,
    Happens,
    NodeSpec,
    Script,
    Tell,
)
from warmroute.config import Admission, Health, Hedging, Index, Journal, KeyConfig, NodeConfig, Pricing, Routing
from warmroute.config.routing import HIGH, LOW, NORMAL
from warmroute.core import messages
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.demand import DemandMeter
from warmroute.core.fleet import Fleet
from warmroute.core.last_decisions import LastDecisions
from warmroute.core.messages import DUE, Lookup, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.rate_limits import RateLimits
from warmroute.core.router import Router
from warmroute.core.traffic import Counters, Traffic


class _Fault:
    """A function of the core that can be made to fail."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act
        self.is_broken = False

    def __call__(self, *arguments: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("a fault of the test")
        return self._act(*arguments)


class _DemandMeter(DemandMeter):
    def __init__(self) -> None:
        super().__init__()
        self.fault = _Fault(super().record_ttft)

    def record_ttft(self, ttft_ms: float) -> None:
        self.fault(ttft_ms)


def hash_key(key: str) -> str:
    return sha256(key.encode()).hexdigest()


PRIORITIES: Final = {"low": LOW, "normal": NORMAL, "high": HIGH}
REQUEST_FIELDS: Final = frozenset(RoutingRequest.__struct_fields__)
MAX_DUE: Final = 1000
"""Times that Due is sent before the script's time has to pass."""
UNLIMITED: Final = 1_000_000_000


def prompt(tokens: int, number: int) -> Lookup:
    """Return a prompt of these tokens. Prompts of the same number share a prefix."""
    return Lookup(array("I", range(number << 8, (number << 8) + tokens)).tobytes(), tokens, 0, salt=str(number))


class CoreStage:
    is_envoy = False
    can = EVERY_REQUEST | {RETRIES_ITSELF, IS_ENVOY, SETS_THE_CLOCK, FAULTS, LATE_ANSWERS, TAKES_SUBSETS}

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._commands: list[Any] = []
        self._new_prompts = count(1_000_000)
        self._ended: dict[int, Any] = {}
        self.urls: dict[str, str] = {}
        """Of nodes that have a process."""
        self._charged: set[int] = set()
        """Calls that have a Charge."""
        self._refused: set[int] = set()
        """Calls whose Charge was answered with an error: they never arrive."""

    # The core.

    async def open(self, script: Script) -> list[Node]:
        table = script.config
        self.fleet = Fleet(Health(**{"slow_start_s": 0.0, **table.get("health", {})}))
        self.cache_view = CacheView(Index())
        routing = Routing(**{"policy": "price", "seed": 3, **table.get("routing", {})})
        split = "always" if any(spec.role != "mixed" for spec in script.nodes.values()) else "by_price"
        pricing = Pricing(**{"split": split, **table.get("pricing", {})})
        self.router = Router(self.fleet, self.cache_view, routing, pricing)
        self._admission = dict(table.get("admission", {}))
        self.admission = Admitter(self.router, Admission(**self._admission))
        self.admission.without_node.first_node_wait_s = script.first_node_wait_s
        self.rate_limits = RateLimits(self._keys(script), self._now_s)
        self.counters, self.traffic = Counters(), Traffic()
        self.journal = LastDecisions(Journal(), self.counters)
        if FAULTS in script.needs:
            self._make_breakable()
        self.brain = Brain(
            self.fleet, self.router, self.admission, self.counters,
            traffic=self.traffic, journal=self.journal,
            max_attempts=table.get("upstream", {}).get("max_attempts", 0),
            hedging=Hedging(**table.get("hedging", {})), rate_limits=self.rate_limits,
        )  # fmt: skip
        return [self.add(f"n{number}", spec) for number, spec in enumerate(script.nodes.values())]

    def _make_breakable(self) -> None:
        meter = _DemandMeter()
        self.faults = {
            "journal": _Fault(self.journal.add), "router": _Fault(self.router.decide), "demand_meter": meter.fault,
        }  # fmt: skip
        self.journal.add = self.faults["journal"]
        self.router.decide = self.faults["router"]  # type: ignore[assignment, method-assign]
        self.router.demand_meter = meter

    @staticmethod
    def _keys(script: Script) -> list[KeyConfig]:
        tenants = {TENANT} | {
            line.event.fields.get("tenant", TENANT) for line in script.lines if isinstance(line.event, (Arrive, Tell))
        }
        limits = {"requests_per_min": UNLIMITED, "tokens_per_min": UNLIMITED, **script.config.get("limits", {})}
        return [
            KeyConfig(sha256=hash_key(tenant), tenant=tenant, max_priority="high", **limits)
            for tenant in sorted(tenants)
        ]

    def add(self, name: str, spec: NodeSpec) -> Node:
        url, models = self.urls.get(name, f"http://{name}:1"), (spec.model,) if spec.state != "unknown" else ()
        config = NodeConfig(
            url, name, models, role=spec.role, engine=spec.engine, island=spec.island, max_inflight=spec.max_inflight,
        )  # fmt: skip
        node = self.fleet.add(config)
        self.cache_view.add_node(name, [spec.model]).set_size(16, spec.cache_tokens)
        if spec.kv_connector:
            node.kv_connector = True
            self.fleet.transfers_changed(node)
        if spec.state == "up":
            self.fleet.check_passed(node, self._now_s)
        elif spec.state == "down":
            self.fleet.check_failed(node, self._now_s, "connection refused")
        return node

    async def close(self) -> None:
        pass

    def handle(self, event: Any, now_s: float) -> Sequence[Any]:
        """Hand an event to the core, and note what comes back."""
        commands = self.brain.handle(event, now_s)
        self._commands += commands
        for call in self.brain.ended:
            assert call.id not in self._ended, "a call is handed over twice"
            self._ended[call.id] = call
        self.brain.ended.clear()
        return commands

    def tell_core(self, event: Any) -> None:
        self.handle(event, self._now_s)

    # Time.

    @property
    def now_s(self) -> float:
        return self._now_s

    async def step(self, until_s: float, sends_due: bool = True) -> bool:
        due_s = self.brain.next_due_s
        if due_s > until_s or not sends_due:
            self._now_s = max(self._now_s, until_s)
            return False
        self._now_s = max(self._now_s, due_s)
        self.tell_core(DUE)
        assert self.brain.next_due_s > due_s or self.brain.due_now, "the shell would send Due for ever"
        await self.send_due()
        return True

    async def send_due(self) -> None:
        for _ in range(MAX_DUE):
            if not self.brain.due_now:
                return
            self.tell_core(DUE)
        raise AssertionError("the core always wants Due")

    # What happens.

    async def arrive(self, play: Play, event: Arrive, on: Node | None) -> None:
        others = [node for node in self.fleet if on is not None and node is not on and not node.draining]
        for other in others:
            self.fleet.drain(other.name)
        call_id, request, fields = self._request(play, event)
        if call_id not in self._charged:
            self._charge(call_id, request)
        lookup = None
        if event.tokens:
            lookup = prompt(event.tokens, next(self._new_prompts) if event.prompt is None else event.prompt)
        if call_id not in self._refused:
            arrive = messages.Arrive(
                call_id, b"%d" % call_id, request, prompt=lookup, prompt_tokens=event.tokens or None,
                kept=play.name_of(call_id), **fields,
            )  # fmt: skip
            self.tell_core(arrive)
        for other in others:
            self.fleet.drain(other.name, False)
        if others:
            self.tell_core(DUE)

    def _request(self, play: Play, event: Arrive) -> tuple[int, RoutingRequest, dict[str, Any]]:
        fields: dict[str, Any] = {"tenant": TENANT, **event.fields}
        if isinstance(priority := fields.get("priority"), str):
            fields["priority"] = PRIORITIES[priority]
        for name, due in (("deadline_ms", "deadline_s"), ("total_ms", "total_deadline_s")):
            if name in fields:
                fields[due] = self._now_s + fields.pop(name) / 1000.0
        if "subset" in fields:
            fields["subset"] = frozenset(play.node(name).name for name in fields["subset"])
        known = {name: value for name, value in fields.items() if name in REQUEST_FIELDS}
        known = {"model": "m", "may_split": True, "arrived_s": self._now_s, **known}
        request = RoutingRequest(**known)
        return play.id_of(event.call), request, {name: value for name, value in fields.items() if name not in known}

    def _charge(self, call_id: int, request: RoutingRequest) -> None:
        limits = self.rate_limits.of(request.tenant)
        if limits is not None:
            before = len(self._commands)
            self.tell_core(messages.Charge(call_id, 1000, True, request))
            self._charged.add(call_id)
            if len(self._commands) > before:
                self._refused.add(call_id)

    async def tell(self, play: Play, event: Tell) -> None:
        if event.message == "Charge":
            _, request, _ = self._request(play, Arrive(event.call, fields=event.fields))
            self._charge(play.id_of(event.call), request)
        else:
            self.tell_core(message_of(play, event))

    async def happen(self, play: Play, event: Happens) -> None:
        fleet, now_s, what = self.fleet, self._now_s, event.what
        if what == "joins":
            spec = event.fields["spec"]
            play.joined(event.node, spec, self.add(event.node, spec))
        elif what in ("breaks", "mended"):
            self.faults[event.node].is_broken = what == "breaks"
            return
        elif what == "reloads":
            self.admission.reconfigure(Admission(**{**self._admission, **event.fields}))
        else:
            node = play.node(event.node)
            if what == "suspected":
                for _ in range(3):
                    fleet.check_timed_out(node, now_s)
                assert node.health.state.value == "down", "it has answered within the last two seconds"
            elif what == "refuses":
                fleet.check_failed(node, now_s, "connection refused")
            elif what == "check_times_out":
                fleet.check_timed_out(node, now_s)
            elif what == "comes_up":
                fleet.update_models(node, node.models or ("m",), [])
                fleet.check_passed(node, now_s)
            elif what == "removed":
                fleet.remove(node.name)
            elif what in ("drained", "undrained"):
                fleet.drain(node.name, what == "drained")
            elif what == "reports":
                fields = event.fields
                node.update_load(fields["running"], fields["waiting"], fields["kv_usage"], now_s)
        self.tell_core(DUE)

    async def check_answers(self, play: Play) -> None:
        """Nobody gets an answer."""

    async def commands(self) -> list[Any]:
        found, self._commands = self._commands, []
        return found

    def answers_withdraw(self) -> bool:
        return True

    def given_up(self) -> list[tuple[str, int, int]]:
        return []

    # The end.

    def ended(self) -> dict[int, Any]:
        return self._ended

    def unfinished(self) -> list[str]:
        left = [f"call {call_id}" for call_id in self.brain.open]
        left += [f"entry of call {call.id}" for call in self.journal.latest(1000) if call.end is None]
        if self.brain.due_now or self.brain.next_due_s < inf:
            left.append(f"Due at {self.brain.next_due_s}")
        return left
