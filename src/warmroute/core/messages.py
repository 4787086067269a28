"""Every value that crosses between edge and core, and the one rule of what a status means. Knows nothing else.

    edge → core    Charge, Arrive, AnswerNow, Started, FirstToken, Ended, Prefilled, Failed, Withdrawn, Cancel, Due
    core → edge    Send, Withdraw, Reject, Cut

A call is one request of a client, from arrival to end; a try is one sending of it to one node. Each message names both:
the edge numbers its calls, the core numbers the tries of a call from 1 on. Nodes are numbers, models are names. Times
are the core's: an edge reports times of the clock that it hands to `handle`.

Rules:
1. The edge owns the first byte. Of several tries of a call, the first whose verdict is ANSWER goes to the client; the
   edge withdraws the others at once and reports the winner.
2. Withdraw is a question. The edge answers it with Withdrawn, or has already sent what makes it void: Started,
   FirstToken or Ended of any try of the call, Failed of this one, or Cancel.
3. Send to a node that the edge does not know, or for a call that it does not know any more: Failed(UNKNOWN).
4. Reject ends the call. Its tries are over without further messages; a response that has begun is broken off with this
   error.
5. Cut asks the edge to end a response that has begun. It answers with Cancel(CUT), or with nothing if the client has
   the last event already: then Ended follows.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from warmroute._kernel import KEY_CHARACTERS as KEY_CHARACTERS
from warmroute._kernel import OUTCOME_OK, hash_blocks
from warmroute.config.routing import NORMAL, PRIORITY_NAMES
from warmroute.core.trace_row import CaptureOutcome

# The request and its prompt.


# What routing knows about a request, besides its prompt. Built once; only the prompt's length may be added later.

FACTS: Final = ("tenant", "model", "route", "priority")
"""The fields of a request that the journal and every explanation show, in this order."""


class RoutingRequest(msgspec.Struct, eq=False, gc=False, array_like=True):
    model: str
    """Empty where the request names none and the fleet serves several."""
    system: bytes | None = None
    """First characters of the system prompt."""
    user: bytes | None = None
    """First characters of the first user message."""
    session: bytes = b""
    """The conversation's name in a field of the body; empty where there is none."""
    tenant: str = ""
    """Empty where no keys are configured."""
    route: str = ""
    """The name of the route whose settings apply; empty where none matches."""
    priority: int = NORMAL
    may_queue: bool = True
    """False where the client prefers a 429 to waiting."""
    arrived_s: float = 0.0
    deadline_s: float = 0.0
    """When the first token is due, on the router's clock; 0 without a deadline."""
    total_deadline_s: float = 0.0
    """When the whole response is due; 0 without a deadline."""
    session_header: bytes = b""
    streams: bool = True
    """Whether the response is streamed; else the whole of it comes at its end."""
    max_output_tokens: int | None = None
    """The limit that the request sets; None where it sets none."""
    input_tokens: int = 0
    """Length of its longest prompt, set only where the nodes of its model differ in their context window; 0: unknown,
    or the engine truncates it."""
    input_exact: bool = False
    """Whether `input_tokens` is exact; else it is an estimate, rather too high than too low."""

    may_split: bool = False
    """Whether one node may prefill the prompt and another one decode the answer."""
    subset: frozenset[str] | None = None
    """The names of the nodes that may serve it; None: all. Envoy may restrict a request to some of its endpoints."""
    start: bytes = b""
    """First bytes of the prompt's JSON text, where a policy uses them."""
    ends_late: bool = False
    """Whether the request is ended when a deadline cannot be met or has passed (`on_deadline = "end"`)."""
    cache_group: str = ""
    """Whose prompts count as cached for it; empty: everybody's."""

    def facts(self) -> dict[str, Any]:
        """Return FACTS as JSON values."""
        found = {name: getattr(self, name) for name in FACTS}
        found["priority"] = PRIORITY_NAMES[self.priority]
        return found

    def forget_text(self) -> None:
        """Drop what the client wrote: of a request that has ended, names and numbers are kept."""
        self.system = self.user = self.subset = None
        self.session = self.session_header = self.start = b""

    def prefix_key(self) -> bytes | None:
        """Return model, start of the system prompt and of the first user message; None where there is neither."""
        if self.system is None and self.user is None:
            return None
        return b"%b\0%b\0%b" % (self.model.encode("utf-8", "surrogatepass"), self.system or b"", self.user or b"")

    def session_key(self) -> bytes:
        """Return the conversation's name: from a header, else from the body; empty where there is none."""
        return self.session_header or self.session


# A lookup: one prompt as the index sees it, a chain of block hashes for each block size in the fleet.

TEXT: Final = "text"
"""The tokenizer name of prompts that are matched by text: they match each other and no engine's block."""


@lru_cache(maxsize=65536)
def namespace_seed(model: str, lora: str, block_size: int, tokenizer: str = "") -> int:
    """Return the namespace, with which every chain of block hashes starts: 64 bits over all that must be equal for two
    prompts to share KV blocks. Tenants are not part of it (see tenant_isolation.py). `tokenizer` is empty where the
    tokens are those of the engine."""
    digest = blake2b(digest_size=8, person=b"warmroute-blocks")
    for part in (model, lora, str(block_size), tokenizer):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


class PromptBatch(msgspec.Struct, eq=False, array_like=True):
    """What a request has besides one ordinary prompt: further prompts, or an engine that does not use its cache for it.
    Its reported cached tokens cannot be compared with a prediction."""

    skips_cache: bool = False
    """Whether the engine prefills the whole prompt, whatever it has cached."""
    others: tuple[Lookup, ...] = ()
    """The request's other prompts, as far as they were read."""
    prompts: int = 1
    """Number of the request's prompts."""
    total_tokens: int = 0
    """Tokens of all the request's prompts."""


class Lookup(msgspec.Struct, eq=False, array_like=True):
    """One prompt to look up. Its first `exact_tokens` tokens are those that the engine will compute."""

    tokens: bytes
    token_count: int
    exact_tokens: int
    salt: str = ""
    cache_group: str = ""
    """The tenant, or the group of tenants it shares caches with; empty where all tenants share."""
    media: tuple[tuple[int, bytes], ...] = ()
    text: bool = False
    """Whether the prompt matches only prompts like itself, not the engine's blocks: `tokens` are bytes of its text, or
    the engine may truncate it."""
    batch: PromptBatch | None = None
    """Set where the request is not a single prompt that the engine takes as it is."""
    chains: dict[tuple[str, str, int], bytes] = {}
    """What `blocks` has computed."""

    def blocks(self, model: str, lora: str, block_size: int) -> bytes:
        """Return the hashes of the prompt's full blocks, 8 bytes each. They are computed once for each block size."""
        key = (model, lora, block_size)
        found = self.chains.get(key)
        if found is None:
            if not self.tokens:  # an edge has sent its hashes, and not of this block size
                return b""
            extra = self._extra(block_size) if self.media or self.salt else None
            seed = namespace_seed(model, lora, block_size, TEXT if self.text else "")
            found = self.chains[key] = hash_blocks(seed, None, self.tokens, block_size, extra)
        return found

    def prefix(self, tokens: int) -> Lookup:
        """Return a lookup of the first `tokens` tokens. It keeps no reference to the rest of the prompt."""
        return Lookup(
            self.tokens[: 4 * tokens],
            min(tokens, self.token_count),
            min(tokens, self.exact_tokens),
            self.salt,
            self.cache_group,
            tuple([one for one in self.media if one[0] < tokens]),
            self.text,
            chains={key: chain[: tokens // key[2] * 8] for key, chain in self.chains.items()},
        )

    def first_tokens(self, count: int) -> list[int]:
        return array("I", self.tokens[: 4 * count]).tolist()

    def model_of(self, prefix: bytes) -> str | None:
        """Return the model or adapter whose blocks `prefix` is; None if this prompt does not start with them, or if
        it is more than tokens (media, text)."""
        if self.media or self.text:
            return None
        return next(
            (lora or model for (model, lora, _), chain in self.chains.items() if chain.startswith(prefix)), None
        )

    def _extra(self, block_size: int) -> list[bytes | None] | None:
        blocks = self.token_count // block_size
        if not blocks:
            return None
        extra: list[bytes | None] = [None] * blocks
        for at, content in self.media:
            block = at // block_size
            if block < blocks:
                extra[block] = (extra[block] or b"") + content
        return salted(extra, blocks, self.salt)


def salted(extra: Sequence[bytes | None] | None, blocks: int, salt: str) -> list[bytes | None] | None:
    """Add the salt to the first block, as engines do. The blocks after it depend on it through their parent."""
    whole: list[bytes | None] | None = None
    if extra is not None:
        whole = list(extra)
    elif salt:
        whole = [None] * blocks
    if salt and whole:
        whole[0] = (whole[0] or b"") + b"salt " + salt.encode("utf-8", "surrogatepass")
    return whole


# What the KV transfer protocol of an engine does: one file in engines/ for each.

MAX_PARAMETERS_BYTES: Final = 1 << 20
"""Longer parameters of a prefill node are ignored. Block ids of 100,000 tokens take about 50 KB."""


class KvTransfer(Protocol):
    """The fields that the prefill request and the decode request have beside the client's: JSON text by name."""

    def prefill_fields(self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int) -> Mapping[str, bytes]:
        """`fields`: those of the client's body. `bootstrap_room`: a random number, the same for both requests."""

    def decode_fields(
        self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        """`transfer`: what `read_transfer` returned; None if the protocol sends both requests at the same time."""

    def read_transfer(self, response: bytes) -> bytes | None:
        """Return what the prefill node's response says about its KV cache; None if it says nothing valid."""


class Outcome(enum.IntEnum):
    """How a ticket ended. The values index `Node.outcomes`, which has room for 16."""

    OK = OUTCOME_OK
    REJECTED = 1  # the node answered 4xx: the client's mistake
    BUSY = 2  # the node answered 429 or 503
    FAILED = 3  # connection error, timeout, other 5xx or an invalid response, before the first byte
    BROKEN = 4  # the response broke off after its first byte
    CANCELLED = 5  # the client disconnected


class Meaning(NamedTuple):
    """What an outcome counts as."""

    passed: bool
    """For the node's health, the node has served the request."""
    at_fault: bool
    """For the node's health, the node has failed."""
    failed: bool
    """For who looks at the node or at the try, the try has failed: on the live page and in traces."""
    logged: str
    """How the log names the end of a request whose client got a response, or a part of one."""
    captured: CaptureOutcome | None
    """How a capture names it; None: the node did not prefill the request, which is not in the capture."""


MEANINGS: Final = {
    Outcome.OK: Meaning(True, False, False, "complete", "ok"),
    Outcome.REJECTED: Meaning(True, False, False, "complete", None),
    Outcome.BUSY: Meaning(False, False, True, "failed", "failed"),
    Outcome.FAILED: Meaning(False, True, True, "failed", "failed"),
    Outcome.BROKEN: Meaning(False, True, True, "broken", "broken"),
    Outcome.CANCELLED: Meaning(False, False, False, "failed", "cancelled"),
}
PASSED: Final = tuple(outcome for outcome in Outcome if MEANINGS[outcome].passed)
AT_FAULT: Final = tuple(outcome for outcome in Outcome if MEANINGS[outcome].at_fault)
FAILURES: Final = tuple(outcome for outcome in Outcome if MEANINGS[outcome].failed)


OTHER_ERROR: Final = "other"


class NodeError(msgspec.Struct, eq=False, gc=False, array_like=True):
    """What is kept of the body of a node's error response. The rest of the body may arrive after the request has gone
    to another node."""

    kind: str = OTHER_ERROR
    """What the engine's text is about (edge/response.py)."""
    type: str = ""
    code: str = ""
    """As the body names them: at most 64 characters of a small set."""
    length: int = 0
    """Bytes of the body; of one without a length that was not read to its end: those that were read."""
    text: str = ""
    """The beginning of the body; empty unless `journal.error_text` is set."""


# Sentences that edge and core both send to clients.

RETRY: Final = "Retry after the time in the `Retry-After` header."
INTERNAL_ERROR: Final = (
    "The server failed while it handled this request. Other requests are not affected. "
    "Retry. If it fails again, tell the operator: the server's log has the details."
)


def unknown_model(model: str) -> str:
    return f"The model `{model[:200]}` does not exist. GET /v1/models lists the models that do."


Usage = tuple[int | None, int | None, int | None]
"""Prompt tokens, cached prompt tokens and output tokens as a response reports them; None where it does not."""


class Role(enum.IntEnum):
    """What a node is asked for."""

    FIRST = 0
    MOVE = 1  # the whole request, after another try
    HEDGE = 2  # the whole request, beside another try
    PREFILL = 3
    DECODE = 4


class Left(enum.IntEnum):
    """Why the edge ends a call."""

    LEFT = 0  # the client disconnected
    INTERNAL = 1  # the edge itself failed at it
    STOPPING = 2  # the router stops
    CUT = 3  # the core asked for it
    LOST = 4  # the link between edge and core was lost, and the edge does not have it any more


# What a status means.

REFUSED: Final = -1
"""No process listens there, or its certificate is wrong."""
TRANSIENT: Final = -2
"""A connect timeout, or a failure of DNS, TLS or network that may pass."""
LOCAL: Final = -3
"""The edge lacks files, ports or memory. It says nothing about the node."""
SILENT: Final = -4
"""The node kept the connection open and sent nothing for too long."""
CLOSED: Final = -5
"""The node closed the connection."""
MALFORMED: Final = -6
"""Not HTTP, or a status that no answer may have."""
TOO_LARGE: Final = -7
"""The answer of a prefill node is larger than any can be."""
ERROR_EVENT: Final = -8
"""The stream of a decode node began with an error."""
NO_ENDPOINT: Final = -9
"""The node's name has no address that Envoy could use. The node was not asked."""
UNKNOWN: Final = -10
"""The edge does not know the node, or not what it should send there. The node was not asked."""
NOT_ASKED: Final = (NO_ENDPOINT, UNKNOWN)
BEFORE_THE_REQUEST: Final = (REFUSED, TRANSIENT, LOCAL, NO_ENDPOINT, UNKNOWN)
"""The node has not got the request, so it cannot have begun it, nor fetched a KV cache for it."""


class Verdict(enum.IntEnum):
    ANSWER = 0  # goes to the client
    NEXT = 1  # another node is asked
    ALONE = 2  # the prefill or the transfer failed: the decode node gets the whole request
    END = 3  # the client has its answer, and none can follow


class Reader(enum.IntEnum):
    """Who reads a status: what it means depends on what the node was asked for, and on who has shown it."""

    WHOLE = 0  # a node that was asked for the whole answer
    PREFILL = 1
    DECODE = 2
    DECODE_ONLY = 3  # a decode node that cannot prefill: it has no other way than the transfer
    ENVOY = 4  # a node's answer that Envoy has passed on
    ENVOY_ITSELF = 5  # an answer of Envoy's own


_ANSWER_OK: Final = (Verdict.ANSWER, Outcome.OK)
_ANSWER_REJECTED: Final = (Verdict.ANSWER, Outcome.REJECTED)
_NEXT_BUSY: Final = (Verdict.NEXT, Outcome.BUSY)
_NEXT_FAILED: Final = (Verdict.NEXT, Outcome.FAILED)
_NEXT_CANCELLED: Final = (Verdict.NEXT, Outcome.CANCELLED)
_ALONE_BUSY: Final = (Verdict.ALONE, Outcome.BUSY)
_ALONE_FAILED: Final = (Verdict.ALONE, Outcome.FAILED)
_ALONE_REJECTED: Final = (Verdict.ALONE, Outcome.REJECTED)
_ALONE_CANCELLED: Final = (Verdict.ALONE, Outcome.CANCELLED)
_END_BUSY: Final = (Verdict.END, Outcome.BUSY)
_END_FAILED: Final = (Verdict.END, Outcome.FAILED)
_END_CANCELLED: Final = (Verdict.END, Outcome.CANCELLED)

# In the order of Reader: WHOLE, PREFILL, DECODE, DECODE_ONLY, ENVOY, ENVOY_ITSELF.
_GOOD: Final = (_ANSWER_OK,) * 6
_CLIENTS_FAULT: Final = (
    _ANSWER_REJECTED, _ALONE_REJECTED, _ALONE_CANCELLED, _ANSWER_REJECTED, _ANSWER_REJECTED, _END_CANCELLED,
)  # fmt: skip
_BUSY_429: Final = (_NEXT_BUSY, _ALONE_BUSY, _NEXT_BUSY, _NEXT_BUSY, _END_BUSY, _END_CANCELLED)
_BUSY_503: Final = (_NEXT_BUSY, _ALONE_BUSY, _NEXT_BUSY, _NEXT_BUSY, _END_BUSY, _END_FAILED)
_SERVERS_FAULT: Final = (
    _NEXT_FAILED, _ALONE_FAILED, _ALONE_CANCELLED, _ALONE_CANCELLED, _END_FAILED, _END_FAILED,
)  # fmt: skip
_BROKEN: Final = (_NEXT_FAILED, _ALONE_FAILED, _NEXT_FAILED, _NEXT_FAILED, _END_FAILED, _END_FAILED)
_OURS: Final = (_NEXT_BUSY, _ALONE_BUSY, _NEXT_BUSY, _NEXT_BUSY, _END_CANCELLED, _END_CANCELLED)
_TRANSFERS_FAULT: Final = (
    _ANSWER_OK, _ALONE_FAILED, _ALONE_CANCELLED, _ALONE_CANCELLED, _ANSWER_OK, _ANSWER_OK,
)  # fmt: skip
_UNASKED: Final = (_NEXT_CANCELLED, _ALONE_CANCELLED, _NEXT_CANCELLED, _NEXT_CANCELLED, _END_CANCELLED, _END_CANCELLED)

_SIGNS: Final = {
    REFUSED: _BROKEN, TRANSIENT: _BROKEN, LOCAL: _OURS, SILENT: _BROKEN, CLOSED: _BROKEN, MALFORMED: _BROKEN,
    TOO_LARGE: _BROKEN, ERROR_EVENT: _TRANSFERS_FAULT, NO_ENDPOINT: _UNASKED, UNKNOWN: _UNASKED,
}  # fmt: skip


def outcome_of(status: int, reader: Reader) -> tuple[Verdict, Outcome]:
    """Return what a status, or a sign of the connection, means. Edge and core ask here and nowhere else.

    A status of 0 is an answer whose head Envoy did not show.
    """
    if status < 0:
        return _SIGNS[status][reader]
    if status < 400:
        return _GOOD[reader]
    if status < 500:
        return (_BUSY_429 if status == 429 else _CLIENTS_FAULT)[reader]
    if status < 600:
        return (_BUSY_503 if status == 503 else _SERVERS_FAULT)[reader]
    return _BROKEN[reader]


# From the edge.


class Charge(msgspec.Struct, gc=False, array_like=True, tag=1):
    """A request of a tenant with limits: before its prompt is read, it takes one request from them."""

    id: int
    body_bytes: int
    has_output: bool
    request: RoutingRequest


class Arrive(msgspec.Struct, eq=False, array_like=True, tag=2):
    """The request is read: where should it go?"""

    id: int
    request_id: bytes
    request: RoutingRequest
    prompt: Lookup | None = None
    """None where nobody wants it, or it is too short to matter."""
    prompt_tokens: int | None = None
    """For the tenant's limits; None if the prompt was not read."""
    repeatable: bool = True
    """Whether the request may be sent to a second node while the first one may still execute it."""
    envoy: bool = False
    """Envoy sends the request, and sends it again if a node fails: once sent, it cannot be taken back."""
    names_node: bool = False
    """Whether the response's head should name the node."""
    kept: Any = None
    """What others want back when the call has ended (capture, traces, prompt doctor, request log). The core does not
    look into it. If it is set, the core keeps the call's history, and puts the call into `Brain.ended`."""


class AnswerNow(msgspec.Struct, gc=False, array_like=True, tag=3):
    """Envoy will not wait longer for a node."""

    id: int


class Started(msgspec.Struct, eq=False, gc=False, array_like=True, tag=4):
    """The client has a byte of this try's response."""

    id: int
    try_: int
    status: int
    error: NodeError | None = None
    served: int = 0
    """The node that answers, where Envoy has chosen another one than the core; 0: the try's own."""
    by_envoy: bool = False
    """Envoy itself answers."""
    retry_after_s: int | None = None


class FirstToken(msgspec.Struct, eq=False, gc=False, array_like=True, tag=5):
    """The first piece of content has come, or as much of the response as the router can see. Implies Started."""

    id: int
    try_: int
    status: int
    error: NodeError | None = None


class Ended(msgspec.Struct, eq=False, gc=False, array_like=True, tag=6):
    """The client has the whole response. Implies Started and FirstToken."""

    id: int
    try_: int
    status: int
    first_s: float
    """When its first byte came, if FirstToken was not sent."""
    usage: Usage | None
    error: NodeError | None = None


class Prefilled(msgspec.Struct, eq=False, gc=False, array_like=True, tag=7):
    """The prefill node has answered."""

    id: int
    try_: int
    has_transfer: bool
    """Whether its answer says where its KV cache is."""
    is_unfinished: bool
    """Without that: whether another node could continue the answer."""
    usage: Usage | None


class Failed(msgspec.Struct, eq=False, gc=False, array_like=True, tag=8):
    """The try has ended without the whole response."""

    id: int
    try_: int
    status: int
    """Of HTTP, or a sign of the connection."""
    reason: str
    """In the router's own words."""
    retry_after_s: int | None = None
    error: NodeError | None = None
    broke: bool = False
    """The client has a part of the response."""


class Withdrawn(msgspec.Struct, eq=False, gc=False, array_like=True, tag=9):
    id: int
    try_: int


class OpenTry(msgspec.Struct, eq=False, gc=False, array_like=True):
    """A try that an edge had before the brain knew it."""

    try_: int
    role: Role
    node: str
    """The node's name: its number was the other brain's."""
    opened_s: float
    status: int = 0
    """Of its response; 0: the client has no byte of it."""
    first_token_s: float = 0.0
    """0: no token has come."""
    is_prefilled: bool = False
    """Of a prefill try: the node has answered."""


class Resume(msgspec.Struct, eq=False, array_like=True):
    """A call that an edge had before the brain knew it. Without tries, it waits for a node."""

    arrive: Arrive
    tries: tuple[OpenTry, ...] = ()
    body_bytes: int = -1
    """Of a tenant with limits, which were taken; -1: it has none."""
    has_output: bool = False

    @property
    def id(self) -> int:
        return self.arrive.id


class Cancel(msgspec.Struct, eq=False, gc=False, array_like=True, tag=10):
    """The edge has ended the call, and has withdrawn its tries."""

    id: int
    why: Left
    reason: str = ""


QUEUE: Final = 1
"""The queue and the deadlines are looked at."""
OVERDUE: Final = 2
"""Calls that wait for a first byte are looked at: pairs that hang, hedges."""
MOVES: Final = 4
"""Calls leave nodes that are down, and nodes that became free get calls."""
ALL: Final = QUEUE | OVERDUE | MOVES


class Due(msgspec.Struct, gc=False):
    """Time has passed: sent when `due_now` is set, and when `next_due_s` has come."""

    parts: int = ALL
    """ALL: whatever is due. Else this part is carried out, due or not."""


Event = (
    Charge | Arrive | AnswerNow | Started | FirstToken | Ended | Prefilled | Failed | Withdrawn | Cancel | Due
)  # fmt: skip
DUE: Final = Due()


# From the core.


class Send(msgspec.Struct, eq=False, gc=False, array_like=True, tag=32):
    """Send the call to this node. The try's ticket is open."""

    id: int
    try_: int
    node: int
    role: Role
    rank: int = -1
    """The data-parallel rank that holds the prompt's prefix; -1: the node has only one."""
    wants_usage: bool = False
    """Whether somebody uses the token counts that the response reports."""
    kv_from: int = 0
    """Of a decode try: the prefill try whose KV cache it fetches. Of a prefill try: the node that will decode."""
    prefill_node: int = 0
    """Of a decode try."""
    needs_partner: bool = False
    """The node cannot prefill."""
    fallbacks: tuple[int, ...] = ()
    """For Envoy: further nodes, the best first."""
    limit_lines: tuple[tuple[str, str], ...] | None = None
    """What is left of the tenant's limits, as headers of the response; None: the tenant has none."""
    node_lines: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of the response that name the node."""


class Withdraw(msgspec.Struct, eq=False, gc=False, array_like=True, tag=33):
    """Give this try up, unless its response has begun."""

    id: int
    try_: int


class Reject(msgspec.Struct, eq=False, array_like=True, tag=34):
    """End the call with this error."""

    id: int
    status: int
    code: str
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    retry_after_s: int | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Cut(msgspec.Struct, eq=False, array_like=True, tag=35):
    """End the response that the client is reading with this error."""

    id: int
    error: Reject


Command = Send | Withdraw | Reject | Cut


# What the core writes down of a traced call.


class ClosedTry(msgspec.Struct, eq=False, gc=False):
    try_: int
    role: Role
    node: str
    island: str
    engine: str
    host: str
    port: int
    opened_s: float
    first_token_s: float
    """0 without a first token."""
    closed_s: float
    outcome: Outcome
    reason: str
    """Why it failed; empty if it did not."""
    prompt_tokens: int
    """0 if the prompt was not looked up."""
    cached_tokens: int
    """Predicted."""
    rank: int | None
    expected_ttft_ms: float
    status: int = 0
    """Of its response; 0 without one."""


class CallHistory(msgspec.Struct, eq=False):
    """What happened to a call that somebody wants back."""

    entered_s: float = 0.0
    """When the prompt was read, and the call asked for a node."""
    queue_length: int = 0
    """Calls that waited in the queue when this one came."""
    queued: bool = False
    """Whether it had to wait, too."""
    decided_s: float = 0.0
    tries: list[ClosedTry] = []
    # at its end, of the try that answered
    opened_s: float = 0.0
    """When its ticket was opened; 0: no node got the call."""
    expected_output: float = 0.0
    """Output tokens that were expected, if the response reported none."""
    predicted: int | None = None
    """Prompt tokens that were expected to be cached; None without a prediction."""
    prompt_tokens: int = 0
    model: str = ""
    """The model that its tokens count for."""
    ms_per_token: float = 0.0
    """GPU time of a long prompt's token on its node."""
    step_ms: float = 0.0
    """GPU time of one step of its node's engine."""


# What an edge knows of the fleet.


class NodeRow(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True):
    """What an edge needs of a node to send it a request."""

    number: int
    """Never given to another node. A node with another address is another node."""
    name: str
    scheme: str
    host: str
    port: int
    api_key_env: str
    """The environment variable with the node's API key; empty if it needs none."""
    engine: str
    role: str
    bootstrap_port: int
    """Of SGLang's KV transfer."""
    max_inflight: int = 0
    """Requests that it gets at the same time; 0: any number."""


class Tables(msgspec.Struct, eq=False):
    """The core makes a new object whenever something in it has changed."""

    version: int = 0
    nodes: dict[int, NodeRow] = {}
    """By number. Without the nodes that have left."""
    is_ready: bool = False
    """Whether a node can serve, or requests may wait for the first one of an autoscaled fleet."""
    cards: Callable[[], tuple[dict[str, object], ...]] = tuple
    """What GET /v1/models lists: every model of the nodes that do not drain, with its longest context window."""
    only_model: str = ""
    """The only model that the fleet serves; empty if there is none, or several."""
    has_several_islands: bool = False
    has_pairs: bool = False
    """Whether a node has, or had, the role `prefill` or `decode`."""
    pairs_only_with_vllm: bool = False
    """Whether all nodes that can be one of a pair run vLLM."""
    shortest_window: dict[str, int] = {}
    """By model, the shortest context window of its nodes in tokens; only of models whose nodes differ in it."""
    wants_tokens: bool = False
    """Whether the policy reads prompts."""
    route_wants_tokens: dict[str, bool] = {}
    """By route, whether its policy does; only of routes with a policy of their own."""
    chains: dict[str, tuple[tuple[str, str, int], ...]] = {}
    """By served model, what its blocks are hashed with: base model, adapter, block size."""
    keeps_prompts: bool = False
    """Whether the core keeps the tokens of prompts that come often, to warm new nodes with them."""
    starting: bool = False
    """Requests wait at the edge until the core knows its nodes."""
    serving: dict[str, tuple[int, ...]] = {}
    """By model, the nodes that would get a request now: up, not draining, able to answer alone."""
    captures: bool = False
    """Whether a capture runs: the core wants the prompts."""
    edges: int = 1
    """Edges that share the limits of nodes and tenants."""
