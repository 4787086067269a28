"""A bounded sample of prompts, in parts, with volatile text masked."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random
from typing import Any, Final, Literal, NamedTuple

import msgspec

from warmroute._kernel import Outline
from warmroute.core.messages import RoutingRequest
from warmroute.core.prefill_work import work
from warmroute.prompt.request_body import RequestBody, decode_json, read_request_body
from warmroute.prompt.template_messages import UnsupportedRequest

# The text of a request body in parts: system messages, tools, other messages, in the order that most templates have.
#
# The parts are what the client sent, not what the chat template makes of them, so that a position in them means
# something to the client's author.

MAX_CHARACTERS: Final = 96 * 1024
"""The rest of a longer prompt is not compared."""
MAX_VALUE_BYTES: Final = 1 << 20
"""A larger value of the body is not parsed."""
SYSTEM_ROLES: Final = ("system", "developer")

PartKind = Literal["message", "tool", "system", "instructions", "prompt"]


class PromptPart(NamedTuple):
    kind: PartKind
    number: int
    """Position in the list of messages or tools."""
    role: str
    """Role of a message; empty for other parts."""
    text: str


class PromptParts(NamedTuple):
    parts: list[PromptPart]
    is_cut: bool
    """Whether the prompt has more text than the parts."""


def read_parts(path: bytes, body: bytes) -> PromptParts | None:
    """Return None for a body without a prompt that can be read. Takes up to a few milliseconds for a large one."""
    request = read_request_body(path, body)
    if request is None:
        return None
    parts: list[PromptPart] = []
    left = MAX_CHARACTERS
    try:
        for part in _parts(request):
            if len(part.text) >= left:
                parts.append(part._replace(text=part.text[:left]))
                return PromptParts(parts, True)
            left -= len(part.text)
            parts.append(part)
    except UnsupportedRequest:
        return PromptParts(parts, True) if parts else None
    return PromptParts(parts, False) if parts else None


def _parts(request: RequestBody) -> Iterator[PromptPart]:
    fields = request.fields
    if "system" in fields:
        yield PromptPart("system", 0, "", _content(_value(request, "system")))
    if "instructions" in fields:
        yield PromptPart("instructions", 0, "", _content(_value(request, "instructions")))
    messages = _messages(request)
    first: PromptPart | None = None
    for first in messages:
        if first.role not in SYSTEM_ROLES:
            break
        yield first
        first = None
    tools = _value(request, "tools")
    if isinstance(tools, list):
        for number, tool in enumerate(tools):
            yield PromptPart("tool", number, "", _json(tool))
    if first is not None:
        yield first
        yield from messages
    if "messages" not in fields:
        for name in ("prompt", "input"):
            yield from _prompt(_value(request, name))


def _messages(request: RequestBody) -> Iterator[PromptPart]:
    if "messages" not in request.fields:
        return
    outline: Outline = request.outline
    spans = memoryview(outline.message_spans).cast("I")
    for number in range(len(spans) // 2):
        start, end = spans[2 * number], spans[2 * number + 1]
        if end - start > MAX_VALUE_BYTES:
            raise UnsupportedRequest("a message is too large")
        yield _message(number, decode_json(request.body, start, end))


def _message(number: int, message: Any) -> PromptPart:
    if not isinstance(message, dict):
        return PromptPart("message", number, "", _json(message))
    text = _content(message.get("content"))
    for name in ("reasoning_content", "tool_calls", "tool_call_id"):
        if message.get(name):
            text += f"\n{_content(message[name])}"
    return PromptPart("message", number, str(message.get("role", ""))[:20], text)


def _prompt(value: Any) -> Iterator[PromptPart]:
    """Yield a completion's first prompt, or the items of a response's input."""
    if isinstance(value, str):
        yield PromptPart("prompt", 0, "", value)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield _message(number, item)
    elif isinstance(value, list) and value and isinstance(value[0], str):
        yield PromptPart("prompt", 0, "", value[0])


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [one.get("text") if isinstance(one, dict) else None for one in content]
        return "\n".join(
            [text if isinstance(text, str) else _json(one) for text, one in zip(texts, content, strict=True)]
        )
    return "" if content is None else _json(content)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8", "replace")[:MAX_CHARACTERS]


def _value(request: RequestBody, name: str) -> Any:
    span = request.fields.get(name)
    if span is None:
        return None
    if span[1] - span[0] > MAX_VALUE_BYTES:
        raise UnsupportedRequest("a value is too large")
    return decode_json(request.body, *span)


# Text that changes from request to request by its form: dates and times, ids, numbers.

Volatile = Literal["time", "id", "number"]
MARK: Final = "\ue0f1"
"""Replaces volatile text. One mark for all forms: an id may happen to have only digits."""

_MONTH: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY: Final = r"(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thurs|Fri|Sat|Satur|Sun)(?:day)?"
_DATE: Final = (
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?[ -]{_MONTH}\.?,?[ -]\d{{2,4}}|{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
    rf"|{_MONTH}\.?,? \d{{4}}|{_DAY}\b|1[5-9]\d{{8}}(?:\.\d+|\d{{3}}(?:\d{{3}})?(?:\d{{3}})?)?(?![\w-]))"
)
_TIME: Final = (
    r"(?:\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?(?:UTC|GMT|CES?T|[ECMP][SD]T|Z\b)"
    r"|[+-]\d{2}:?\d{2}\b)?|\d{1,2} ?[AaPp]\.?[Mm]\b\.?)"
)
_WHEN: Final = rf"(?:{_DATE}|{_TIME})(?:(?:,? (?:at )?|T|,)(?:{_DATE}|{_TIME}))*"
_ID: Final = (
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|(?=[A-Za-z_-]{0,64}\d)(?=[\d_-]{0,64}[A-Za-z])[A-Za-z0-9_-]{8,}"
)
_GATE: Final = r"(?=\d|[A-Za-z_-]{1,64}\d|[JFMASOND][a-z]{2,8}\.?,? \d|[MTWFS][a-z]{1,5}day)"
"""Words that may be volatile. It rules out most words at once. Its repeats are bounded: the search is linear."""
_VOLATILE: Final = re.compile(
    rf"(?<![A-Za-z0-9]){_GATE}(?:(?P<time>{_WHEN})(?![A-Za-z0-9])|(?P<id>{_ID})|(?P<number>\d+(?:[.,]\d+)*))"
)
_CHUNK: Final = 4096
"""Characters that are searched at once: the search holds the interpreter lock."""


class Span(NamedTuple):
    start: int
    end: int
    kind: Volatile


def volatile_spans(text: str) -> Iterator[Span]:
    """Yield the volatile parts of a text, in order."""
    start = 0
    while start < len(text):
        end = start + _CHUNK
        if end < len(text):  # cut between words
            cut = max(text.rfind("\n", start, end), text.rfind(" ", start, end))
            end = cut + 1 if cut > start else end
        for match in _VOLATILE.finditer(text, start, end):
            kind: Volatile = "time" if match["time"] else "id" if match["id"] else "number"
            yield Span(match.start(), match.end(), kind)
        start = end


def hide(text: str) -> str:
    """Return the text with its letters as x and its digits as 0: its form, not its content."""
    return "".join(["0" if one.isdigit() else "x" if one.isalnum() else one for one in text])


# A prompt's text with volatile text replaced by marks and tools in a fixed order: what prompts may have in common.
#
# Two prompts whose masked texts agree further than their own could share more of the cache if the volatile text, or the
# order of the tools, did not change. Positions in a masked text lead back to the part and the character.

_PART_START: Final = "\ue0f2"


class Position(NamedTuple):
    """A place in a prompt, as its client's author finds it."""

    part: PromptPart
    character: int


class MaskedPart(NamedTuple):
    part: PromptPart
    """Text of the part as the client sent it."""
    raw: str
    """Text of the part; a tool's with its fields sorted."""
    spans: list[Span]
    """Volatile text in `raw`."""
    text: str
    """`raw` with marks in place of volatile text."""
    start: int
    """Where `text` starts in the prompt's masked text."""

    def value(self, number: int) -> str:
        """Return the text that a mark stands for."""
        span = self.spans[number]
        return self.raw[span.start : span.end]

    def character(self, offset: int) -> int:
        """Return the character of the part as sent for an offset in `text`."""
        at = _raw_offset(self, offset)
        if self.raw is self.part.text:
            return at
        length = next((span.end - at for span in self.spans if span.start == at), 24)
        return max(0, self.part.text.find(self.raw[at : at + length]))


class MaskedPrompt:
    __slots__ = ("_raw_ends", "_starts", "history_end", "is_cut", "parts", "sent_tools", "size_bytes", "text")

    def __init__(self, prompt: PromptParts) -> None:
        self.is_cut = prompt.is_cut
        parts = _sorted_tools(prompt.parts)
        self.sent_tools = [part.number for _raw, part in parts if part.kind == "tool"]
        """Positions of the tools as sent, in the order of the masked text."""
        self.parts: list[MaskedPart] = []
        pieces: list[str] = []
        at = 0
        for raw, part in parts:
            head = f"{_PART_START}{part.kind}/{part.role}\n"
            spans = list(volatile_spans(raw))
            text = _masked(raw, spans)
            self.parts.append(MaskedPart(part, raw, spans, text, at + len(head)))
            pieces += (head, text)
            at += len(head) + len(text)
        self.text = "".join(pieces)
        self._starts = [part.start for part in self.parts]
        self._raw_ends = list(accumulate(len(part.raw) for part in self.parts))
        last = max((number for number, one in enumerate(self.parts) if one.part.role == "assistant"), default=None)
        self.history_end = 0 if last is None or last == len(self.parts) - 1 else self._raw_ends[last]
        """Characters up to the last message of the assistant: a conversation's earlier request had nearly all of
        them. 0 for a prompt without."""
        self.size_bytes = 2 * len(self.text) * (1 if self.text.isascii() else 2) + 256 * len(self.parts)

    @property
    def characters(self) -> int:
        return self._raw_ends[-1] if self._raw_ends else 0

    def part_at(self, at: int) -> int:
        """Return the number of the part that a position in the masked text belongs to."""
        return max(0, bisect_right(self._starts, at) - 1)

    def position(self, at: int) -> Position:
        """Return where a position of the masked text is in the prompt as sent."""
        part = self.parts[self.part_at(at)]
        return Position(part.part, part.character(min(max(0, at - part.start), len(part.text))))

    def raw_characters(self, at: int) -> int:
        """Return how many characters of the prompt as sent lie before a position of the masked text."""
        number = self.part_at(at)
        before = self._raw_ends[number - 1] if number else 0
        part = self.parts[number]
        return before + _raw_offset(part, min(max(0, at - part.start), len(part.text)))


def common_prefix(one: str | bytes, other: str | bytes) -> int:
    """Return how many leading characters, or bytes, are equal."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    step = 64
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _masked(text: str, spans: list[Span]) -> str:
    pieces: list[str] = []
    at = 0
    for span in spans:
        pieces += (text[at : span.start], MARK)
        at = span.end
    pieces.append(text[at:])
    return "".join(pieces)


def _raw_offset(part: MaskedPart, offset: int) -> int:
    """Return the character of the part as sent for an offset in its masked text."""
    shift = 0
    for span in part.spans:
        if span.start - shift >= offset:
            break
        shift += span.end - span.start - 1
    return max(0, offset + shift)


def _sorted_tools(parts: list[PromptPart]) -> list[tuple[str, PromptPart]]:
    """Return each part's text and the part, with the tools, and the fields within each, in a fixed order."""
    tools = [(_sorted_json(part.text), part) for part in parts if part.kind == "tool"]
    tools.sort(key=lambda tool: _masked(tool[0], list(volatile_spans(tool[0]))))
    sent = [(part.text, part) for part in parts]
    if not tools:
        return sent
    first = next(number for number, part in enumerate(parts) if part.kind == "tool")
    return [*sent[:first], *tools, *sent[first + len(tools) :]]


def _sorted_json(text: str) -> str:
    """Return the JSON with sorted fields; the very text if they are sorted already, or if it is none."""
    try:
        ordered = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text
    return text if ordered == text else ordered


# A bounded sample of recent prompts, by model and route.
#
# Of the requests of a route that arrive within SAMPLE_S, the router keeps a reference to the body of one, drawn at
# random with equal chances, and nothing of the others. The sample stands for all of them (its weight), so that shares
# and costs do not depend on the rhythm in which clients send. It is complete when the response has ended: then the
# doctor knows how much of the prompt was cached.

SAMPLE_S: Final = 1.0
MAX_ROUTES: Final = 64
"""Further routes are not sampled."""
MAX_PENDING: Final = 256
"""Sampled requests without a complete response. The oldest are dropped first."""
MAX_PENDING_BYTES: Final = 16 << 20
"""Memory for the bodies of sampled requests without a complete response."""
MAX_RECENT: Final = 64
"""Samples of a route that are compared."""
MAX_OLDER: Final = 30
"""Samples that are kept longer, to see how prompts have changed."""
OLDER_S: Final = 60.0
"""Time between two of the MAX_OLDER samples."""

RouteKey = tuple[str, str]
"""Model and route, as core/traffic.py counts them."""


class _Draw:
    """The requests of a route of which one is sampled."""

    __slots__ = ("ends_s", "requests", "sample")

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.requests = 0
        self.sample: PromptSample | None = None


class PromptSample:
    __slots__ = (
        "arrived_s", "body", "cached_tokens", "draw", "ms_per_token", "number", "path", "prompt", "prompt_tokens",
        "samples", "step_ms", "tenant", "tokens",
    )  # fmt: skip

    def __init__(
        self, samples: PromptSamples, draw: _Draw, path: bytes, body: bytes, tenant: str, arrived_s: float
    ) -> None:
        self.samples: PromptSamples | None = samples
        """The samples that it belongs to; None once it is complete or dropped."""
        self.draw = draw
        self.number = 0
        """Number of the sample among the route's, in the order in which the doctor got them."""
        self.path = path
        self.body = body
        """The request's body; empty once the doctor has read it."""
        self.tenant = tenant
        self.arrived_s = arrived_s
        self.prompt: MaskedPrompt | None = None
        self.tokens = b""
        """The prompt's tokens as the router read them, four bytes each."""
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None
        """None if neither the node nor the router knows it. Then the prompt is not compared."""
        self.ms_per_token = 0.0
        self.step_ms = 0.0

    def completed(
        self, key: RouteKey, tokens: bytes, prompt_tokens: int, cached_tokens: int | None, ms_per_token: float,
        step_ms: float,
    ) -> None:  # fmt: skip
        """The response is complete. `key`: the model and route that its tokens count for. `tokens`: the prompt as the
        router read it; empty if it did not. `cached_tokens`: None if neither the node nor the router knows them. A
        prefill takes `ms_per_token`, and at least `step_ms`."""
        samples, self.samples = self.samples, None
        if samples is None:
            return
        self.tokens = tokens
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.ms_per_token, self.step_ms = ms_per_token, step_ms
        samples.add(key, self)

    def drop(self) -> None:
        """The request has ended without a complete response."""
        if self.samples is not None:
            self.samples.drop(self)

    def cost_ms(self, cached: float) -> float:
        """Return the prefill time of the prompt with this many cached tokens (core/traffic.py)."""
        return max(self.step_ms, self.ms_per_token * work(self.prompt_tokens - cached, cached))

    @property
    def weight(self) -> int:
        """The number of requests that it stands for, itself included."""
        return self.draw.requests

    @property
    def size_bytes(self) -> int:
        read = self.prompt.size_bytes if self.prompt is not None else 0
        return len(self.body) + len(self.tokens) + read


class RouteSamples:
    """What the doctor has of one route. Its thread changes it."""

    def __init__(self) -> None:
        self.recent: deque[PromptSample] = deque(maxlen=MAX_RECENT)
        self.older: deque[PromptSample] = deque(maxlen=MAX_OLDER)
        self.last_number = 0

    def add(self, sample: PromptSample) -> None:
        """Add a sample that was read. Every OLDER_S, one moves to the older ones."""
        self.last_number += 1
        sample.number = self.last_number
        if len(self.recent) == MAX_RECENT:
            first = self.recent[0]
            if not self.older or first.arrived_s - self.older[-1].arrived_s >= OLDER_S:
                self.older.append(first)
        self.recent.append(sample)

    @property
    def size_bytes(self) -> int:
        return sum([sample.size_bytes for sample in (*self.recent, *self.older)])


class PromptSamples:
    """Used on the event loop."""

    def __init__(self, random: Callable[[], float] | None = None) -> None:
        self._draws: dict[RouteKey, _Draw] = {}
        self._pending: dict[PromptSample, int] = {}
        """Samples whose response is not complete, and the size of their bodies; the oldest first."""
        self._pending_bytes = 0
        self._new: dict[PromptSample, RouteKey] = {}
        self._random = random or Random().random

    def offer(self, request: RoutingRequest, path: bytes, body: bytes) -> PromptSample | None:
        """Take a sample of a request that has just arrived, if the draw of its route falls on it."""
        key, now_s = (request.model, request.route), request.arrived_s
        draw = self._draws.get(key)
        if draw is None or now_s >= draw.ends_s:
            if draw is None and not self._has_room(now_s):
                return None
            draw = self._draws[key] = _Draw(now_s + SAMPLE_S)
        draw.requests = requests = draw.requests + 1
        if requests > 1 and self._random() * requests >= 1.0:
            return None
        if draw.sample is not None:
            self.drop(draw.sample)
        sample = draw.sample = PromptSample(self, draw, path, body, request.tenant, now_s)
        pending = self._pending
        pending[sample] = len(body)
        self._pending_bytes += len(body)
        while len(pending) > MAX_PENDING or self._pending_bytes > MAX_PENDING_BYTES:
            self.drop(next(iter(pending)))
        return sample

    def _has_room(self, now_s: float) -> bool:
        """Return whether another route can be sampled. Routes without requests make room."""
        if len(self._draws) >= MAX_ROUTES:
            self._draws = {key: draw for key, draw in self._draws.items() if draw.ends_s > now_s}
        return len(self._draws) < MAX_ROUTES

    def drop(self, sample: PromptSample) -> None:
        self._forget(sample)
        self._new.pop(sample, None)
        sample.samples, sample.body = None, b""

    def _forget(self, sample: PromptSample) -> None:
        self._pending_bytes -= self._pending.pop(sample, 0)

    def add(self, key: RouteKey, sample: PromptSample) -> None:
        """Add a sample whose response is complete."""
        self._forget(sample)
        if len(self._new) < MAX_PENDING:
            self._new[sample] = key

    def forget_all(self) -> None:
        for sample in (*self._pending, *self._new):
            sample.samples, sample.body = None, b""
        self._draws, self._pending, self._pending_bytes, self._new = {}, {}, 0, {}

    def take(self, now_s: float) -> list[tuple[RouteKey, PromptSample]]:
        """Return the samples that are complete since the last call, except those that another may still replace."""
        taken = [(key, sample) for sample, key in self._new.items() if sample.draw.ends_s <= now_s]
        for _key, sample in taken:
            del self._new[sample]
            sample.draw.sample = None
        return taken
