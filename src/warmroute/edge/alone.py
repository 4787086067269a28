"""An edge without a brain: it chooses nodes by itself, by what it last knew of the fleet.

A prompt goes to the node that its first characters hash to, unless that node has BOUND times the mean number of
requests. Drained, removed and downed nodes get nothing. The edge keeps to its share of each node's `max_inflight` and
of each tenant's limits: one part of as many as there were edges. Nothing waits: what has no room is rejected. After
ALONE_MAX_S every new request is rejected, since keys may have been revoked meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from warmroute.core.messages import (
    BEFORE_THE_REQUEST,
    RETRY,
    Arrive,
    Cancel,
    Charge,
    Command,
    Due,
    Ended,
    Event,
    Failed,
    FirstToken,
    Reader,
    Reject,
    Resume,
    Role,
    RoutingRequest,
    Send,
    Started,
    Tables,
    Verdict,
    Withdraw,
    outcome_of,
    unknown_model,
)

ALONE_MAX_S: Final = 60.0
BOUND: Final = 1.25
"""A node gets no prompt of others while it has this many times the mean number of requests."""
FIRST_TRY: Final = 1_000_000
"""Numbers of tries that no brain has given."""
MAX_TRIES: Final = 3
RETRY_AFTER_S: Final = 1
BYTES_PER_TOKEN: Final = 4.0

_NO_BRAIN: Final = (503, "no_brain", f"The process that decides has not answered for {ALONE_MAX_S:g} s. {RETRY}")

Limits = tuple[int, int]
"""Requests and tokens of a tenant per minute; 0: any number."""


class _Share:
    """This edge's part of one limit, as a token bucket."""

    def __init__(self, per_min: float, now_s: float) -> None:
        self.per_min = self.level = per_min
        self.at_s = now_s

    def take(self, amount: float, now_s: float) -> float:
        """Return 0, or after how many seconds so much is left."""
        self.level = min(self.per_min, self.level + (now_s - self.at_s) * self.per_min / 60.0)
        self.at_s = now_s
        missing = min(amount, self.per_min) - self.level
        if missing > 0.0:
            return missing * 60.0 / self.per_min
        self.level -= amount
        return 0.0


class _Call:
    def __init__(self, arrive: Arrive) -> None:
        self.arrive = arrive
        self.nodes: dict[int, int] = {}
        """Its open tries, and their nodes."""
        self.tried: list[int] = []


class Alone:
    def __init__(self, tables: Tables, limits: dict[str, Limits], now_s: float) -> None:
        """`limits`: those of each tenant that has some."""
        self._tables = tables
        self._until_s = now_s + ALONE_MAX_S
        edges = max(1, tables.edges)
        self._shares = {
            tenant: tuple([_Share(per_min / edges, now_s) if per_min else None for per_min in both])
            for tenant, both in limits.items()
        }
        self._most = {row.number: -(-row.max_inflight // edges) for row in tables.nodes.values() if row.max_inflight}
        self._inflight: dict[int, int] = {}
        self._calls: dict[int, _Call] = {}
        self._last_try = FIRST_TRY

    def handle(self, event: Event, now_s: float) -> Sequence[Command]:
        """As the core's door."""
        if isinstance(event, Charge):
            return self._charge(event, now_s)
        if isinstance(event, Arrive):
            call = self._calls[event.id] = _Call(event)
            return self._place(call, now_s)
        known = None if isinstance(event, Due) else self._calls.get(event.id)
        if known is None:
            return ()
        if isinstance(event, Ended | Cancel):
            self._forget(known)
        elif isinstance(event, Failed):
            return self._failed(known, event, now_s)
        elif isinstance(event, Started | FirstToken):
            self._close(known, [try_ for try_ in known.nodes if try_ != event.try_])
        return ()

    def take_over(self, resume: Resume, now_s: float) -> Sequence[Command]:
        """A call that the brain had: one that has a node stays there."""
        call = self._calls[resume.id] = _Call(resume.arrive)
        numbers = {row.name: row.number for row in self._tables.nodes.values()}
        for one in resume.tries:
            self._open(call, one.try_, numbers.get(one.node, 0))
        whole = [one for one in resume.tries if one.role is not Role.PREFILL]
        if whole:
            return ()
        withdrawn: list[Command] = [Withdraw(resume.id, one.try_) for one in resume.tries]
        self._close(call, [one.try_ for one in resume.tries])
        return [*withdrawn, *self._place(call, now_s)]

    # A request.

    def _charge(self, event: Charge, now_s: float) -> Sequence[Command]:
        requests, tokens = self._shares.get(event.request.tenant, (None, None))
        wait_s = requests.take(1.0, now_s) if requests is not None else 0.0
        if not wait_s and tokens is not None:
            wait_s = tokens.take(event.body_bytes / BYTES_PER_TOKEN, now_s)
        if not wait_s:
            return ()
        message = f"The limit of this key is reached, as far as this part of the router knows. {RETRY}"
        return (Reject(event.id, 429, "rate_limit_exceeded", message, "rate_limit_error", None, 1 + int(wait_s)),)

    def _place(self, call: _Call, now_s: float) -> Sequence[Command]:
        """Send the call to the best node that it has not been to."""
        arrive, tables = call.arrive, self._tables
        request, id = arrive.request, arrive.id
        model = request.model or tables.only_model
        if now_s > self._until_s:
            return self._reject(call, *_NO_BRAIN)
        nodes = tables.serving.get(model)
        if nodes is None:
            return self._reject(call, 404, "model_not_found", unknown_model(request.model), "invalid_request_error")
        best = self._best(request, [number for number in nodes if number not in call.tried])
        if best is None or len(call.tried) >= MAX_TRIES:
            what = f"the model `{request.model[:200]}`" if request.model else "this request"
            return self._reject(call, 503, "no_node_available", f"No node can serve {what} now. {RETRY}")
        self._last_try = try_ = self._last_try + 1
        call.tried.append(best)
        self._open(call, try_, best)
        return (Send(id, try_, best, Role.MOVE if len(call.tried) > 1 else Role.FIRST, wants_usage=True),)

    def _best(self, request: RoutingRequest, nodes: Sequence[int]) -> int | None:
        """Rendezvous hashing: without a node, only its own prompts go elsewhere."""
        inflight, rows, subset = self._inflight, self._tables.nodes, request.subset
        fit = [
            number for number in nodes
            if number in rows and (subset is None or rows[number].name in subset)
            and inflight.get(number, 0) < self._most.get(number, 1 << 30)
        ]  # fmt: skip
        if not fit:
            return None
        most = BOUND * (1 + sum([inflight.get(number, 0) for number in fit])) / len(fit)
        key = request.session_key() or request.prefix_key() or request.model.encode("utf-8", "surrogatepass")
        order = sorted(
            fit, key=lambda number: blake2b(key + b"\0" + rows[number].name.encode(), digest_size=16).digest()
        )
        return next((number for number in order if inflight.get(number, 0) < most), order[0])

    def _failed(self, call: _Call, event: Failed, now_s: float) -> Sequence[Command]:
        self._close(call, [event.try_])
        if event.broke:
            self._forget(call)
            return ()
        if call.nodes:  # the other one of two goes on
            return ()
        verdict, _ = outcome_of(event.status, Reader.WHOLE)
        again = call.arrive.repeatable or event.status in BEFORE_THE_REQUEST or event.status in (429, 503)
        if verdict is not Verdict.NEXT or not again or call.arrive.envoy:
            code = "upstream_failed"
            return self._reject(call, 502, code, f"The node did not complete the request. {RETRY}")
        return self._place(call, now_s)

    def _reject(
        self, call: _Call, status: int, code: str, message: str, kind: str = "server_error"
    ) -> Sequence[Command]:
        self._forget(call)
        return (Reject(call.arrive.id, status, code, message, kind, None, RETRY_AFTER_S if status >= 500 else None),)

    # Counting.

    def _open(self, call: _Call, try_: int, node: int) -> None:
        call.nodes[try_] = node
        self._inflight[node] = self._inflight.get(node, 0) + 1

    def _close(self, call: _Call, tries: Sequence[int]) -> None:
        for try_ in tries:
            node = call.nodes.pop(try_, None)
            if node is not None:
                self._inflight[node] -= 1

    def _forget(self, call: _Call) -> None:
        self._close(call, list(call.nodes))
        self._calls.pop(call.arrive.id, None)
