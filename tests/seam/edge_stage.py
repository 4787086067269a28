"""What the stages with an edge share: prompts of a given length, a record of what the edge tells, and one clock."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from support.polling import until

from seam.core_stage import CoreStage
from seam.player import TENANT
from seam.script import Arrive, Script
from warmroute.config import Upstream, from_table
from warmroute.core.messages import NOT_ASKED, Cancel, Failed, Left, Withdrawn
from warmroute.core.node import Node
from warmroute.core.tables import FleetTables
from warmroute.edge.arrival import Kept
from warmroute.edge.connection_pool import ConnectionPools
from warmroute.edge.proxy import Proxy
from warmroute.edge.sockets import PlainSockets
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.engines import KV_TRANSFERS
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.reader import PendingPrompt

BODY_BYTES: Final = 400
"""The router reads no prompt of a body that is much shorter."""
PATIENCE_S: Final = 20.0


class ScriptedPrompts:
    """Reads no prompt: it has the length that the script says. Until a script lets a call arrive, it is being read."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, int]] = {}
        """Tokens and number of the prompt, by the name of the call."""
        self.pending: dict[str, PendingPrompt] = {}

    def read(
        self, _model: str, _path: bytes, body: bytes, then: Callable[[Prompt | None], None], _outline: Any = None
    ) -> Prompt | PendingPrompt:
        call = json.loads(body)["messages"][0]["content"].split("\n")[0]
        if call not in self.sizes:
            self.pending[call] = PendingPrompt(then)
            return self.pending[call]
        return self.prompt(call)

    def prompt(self, call: str) -> Prompt:
        tokens, number = self.sizes[call]
        return Prompt(
            array("I", range(number << 8, (number << 8) + tokens)).tobytes(), 0, cache_salt=str(number)
        )  # fmt: skip


def request_body(call: str, fields: Any) -> bytes:
    """Return the body of a call's request."""
    body: dict[str, Any] = {
        "model": fields.get("model", "m"),
        "messages": [{"role": "user", "content": f"{call}\n".ljust(BODY_BYTES, "x")}],
    }
    if fields.get("streams", True):
        body["stream"] = True
    if "max_output_tokens" in fields:
        body["max_tokens"] = fields["max_output_tokens"]
    return json.dumps(body, separators=(",", ":")).encode()


def request_headers(number: int, fields: Any) -> dict[str, str]:
    headers = {"authorization": f"Bearer {fields.get('tenant', TENANT)}", "x-request-id": f"call-{number}"}
    if "priority" in fields:
        headers["x-priority"] = fields["priority"]
    if not fields.get("may_queue", True):
        headers["x-queue"] = "no"
    if "deadline_ms" in fields:
        headers["x-deadline-ttft-ms"] = str(fields["deadline_ms"])
    if "total_ms" in fields:
        headers["x-deadline-ms"] = str(fields["total_ms"])
    if "session_header" in fields:
        headers["x-session-id"] = fields["session_header"].decode()
    return headers


def usage_json(usage: tuple[int | None, int | None, int | None] | None) -> bytes:
    """Return what a response says about its tokens; empty if it says nothing."""
    if usage is None:
        return b""
    prompt, cached, output = usage
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    return json.dumps({"prompt_tokens": prompt, "completion_tokens": output, **details}).encode()


class EdgeStage(CoreStage):
    """The core behind a Proxy."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = time.monotonic()  # the kernel notes when a node sent its last byte
        self.prompts = ScriptedPrompts()
        self.sockets = PlainSockets()
        self.told: list[Any] = []
        """What the edge has told the core."""
        self._given_up: list[tuple[str, int, int]] = []

    async def open(self, script: Script) -> list[Node]:
        nodes = await super().open(script)
        now = self._now
        self.timers = TimerWheel(now)
        self.sockets.start()
        upstream = Upstream(**{"connect_timeout_s": 60.0, **script.config.get("upstream", {})})
        self.pools = ConnectionPools(upstream, self.timers, self.sockets)
        ends_late = any(isinstance(line.event, Arrive) and line.event.fields.get("ends_late") for line in script.lines)
        routes = {"routes": [{"name": "late", "on_deadline": "end"}]} if ends_late else {}
        config = msgspec.structs.replace(
            from_table(routes, experiment=True), keys=tuple(self._keys(script)), upstream=upstream
        )
        tables = FleetTables(self.fleet, self.router, self.admission, self.cache_view)
        self.proxy = Proxy(
            config, self.handle, lambda: self.brain.due_now, tables.current,
            self.prompts, self.pools, self.counters, keep=lambda *_: Kept(), kv_transfers=KV_TRANSFERS, now=now,  # type: ignore[arg-type]
        )  # fmt: skip
        return nodes

    def _now(self) -> float:
        return self._now_s

    def handle(self, event: Any, now_s: float) -> Sequence[Any]:
        self.told.append(event)
        if isinstance(event, Withdrawn) or (isinstance(event, Failed) and event.status in NOT_ASKED):
            self._given_up.append(("Withdrawn", event.id, event.try_))
        elif isinstance(event, Cancel) and event.why is Left.CUT:
            self._given_up.append(("Cancel", event.id, 0))
        return super().handle(event, now_s)

    def tell_core(self, event: Any) -> None:
        self.proxy.tell(event, self._now_s)

    async def step(self, until_s: float, sends_due: bool = True) -> bool:
        is_left = await super().step(until_s, sends_due)
        self.timers.sweep()
        await asyncio.sleep(0)
        return is_left

    def answers_withdraw(self) -> bool:
        return False

    def given_up(self) -> list[tuple[str, int, int]]:
        found, self._given_up = self._given_up, []
        return found

    async def until_told(self, messages: tuple[str, ...], call: int, try_: int | None, since: int) -> None:
        """Wait until the edge tells one of these messages. `since`: how many it had told before."""

        def is_told() -> bool:
            return any(
                type(event).__name__ in messages and event.id == call and (try_ is None or event.try_ == try_)
                for event in self.told[since:]
            )

        await until(is_told, f"the edge tells {messages[0]} of {call}, {try_}", PATIENCE_S)
