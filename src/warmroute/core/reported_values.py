"""Limits of the values that nodes report. A value outside its limits is ignored, and logged once for each node.

A node may report anything: a faulty engine, another program at its address, or an attacker. The limits are far above
what any engine needs, and low enough that no value can break or slow down the router.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from warmroute._kernel import MAX_BLOCK_TOKENS as MAX_BLOCK_TOKENS
from warmroute.event_log import EventLog

log = EventLog("warmroute.fleet")

MAX_RANKS: Final = 256
"""Data-parallel ranks of one node. Each has its own sockets."""
MAX_CACHE_TOKENS: Final = 2_000_000_000
"""KV cache of one node. In blocks of one token, the kernel's recency list can hold as many."""
MAX_SEQUENCE_NUMBER: Final = 2**62
"""Of a KV event message."""
MAX_NAME_LENGTH: Final = 512
"""Characters of a model's or adapter's name."""
MAX_MODELS: Final = 4096
"""Models and adapters of one node."""
MAX_TIME_S: Final = 1e11
"""A Unix time: the year 5138."""
MAX_RESTARTS: Final = 8
RESTARTS_WITHIN_S: Final = 60.0
"""More restarts in this time are none."""
MAX_JSON_BYTES: Final = 2 << 20
"""Of a response that is decoded as a whole, on the event loop."""
_SHOWN_CHARACTERS: Final = 60
_MAX_PROMPT_TOKENS: Final = 100_000_000
_MAX_OUTPUT_TOKENS: Final = 1_000_000

LIMITS: Final[dict[str, tuple[float, float]]] = {
    "running": (0, 1_000_000),
    "waiting": (0, 1_000_000),
    "kv_usage": (0, 1.1),
    "incarnation": (0, MAX_TIME_S),
    "block_size": (1, MAX_BLOCK_TOKENS),
    "capacity_tokens": (1, MAX_CACHE_TOKENS),
    "adapter_slots": (1, 10_000),
    "max_model_len": (1, 1_000_000_000),
    "rank": (0, MAX_RANKS - 1),
    "ranks": (1, MAX_RANKS),
    "port": (1, 65_535),
    "prompt_tokens": (0, _MAX_PROMPT_TOKENS),
    "cached_tokens": (0, _MAX_PROMPT_TOKENS),
    "output_tokens": (0, _MAX_OUTPUT_TOKENS),
}
"""Name of a value → the least and the greatest that counts."""

Report = TypeVar("Report", bound=msgspec.Struct)


class ReportedValues:
    """Checks the values that one node reports."""

    __slots__ = ("_ignored", "_node", "_start_times_s")

    def __init__(self, node: str) -> None:
        self._node = node
        self._ignored: set[str] = set()
        """Names of the values that were ignored and logged."""
        self._start_times_s: list[tuple[float, float]] = []
        """The latest start times of the engine's process, and when each was first reported."""

    def whole(self, name: str, value: Any) -> int | None:
        """Return a whole number; None if it is missing, no whole number, or outside its limits."""
        if value is None:
            return None
        least, most = LIMITS[name]
        if type(value) is int and least <= value <= most:
            return value
        self.ignore(name, value)
        return None

    def check(self, report: Report) -> Report:
        """Return the report with 0 for every value outside its limits. 0 means that the node did not report it."""
        wrong: dict[str, int] = {}
        for name in report.__struct_fields__:
            limits = LIMITS.get(name)
            value = getattr(report, name)
            if limits is not None and value and not limits[0] <= value <= limits[1]:
                self.ignore(name, value)
                wrong[name] = 0
        return msgspec.structs.replace(report, **wrong) if wrong else report

    def usage(
        self, prompt: int | None, cached: int | None, output: int | None
    ) -> tuple[int | None, int | None, int | None]:
        """Return the token counts of a response, with None for impossible ones."""
        if prompt is not None and not 0 <= prompt <= _MAX_PROMPT_TOKENS:
            prompt = self.whole("prompt_tokens", prompt)
        if cached is not None:
            cached = self.whole("cached_tokens", cached)
            if cached is not None and prompt is not None and cached > prompt:
                self.ignore("cached_tokens", cached, f"more than the prompt's {prompt:,} tokens")
                cached = None
        if output is not None and not 0 <= output <= _MAX_OUTPUT_TOKENS:
            output = self.whole("output_tokens", output)
        return prompt, cached, output

    def start_time(self, start_s: float, now_s: float) -> float:
        """Return the start time of the engine's process. A node that names again one which it had replaced, or a new
        one every few seconds, did not restart: the time of before counts."""
        known = self._start_times_s
        if not start_s or (known and known[-1][0] == start_s):
            return start_s
        reason = ""
        if any(start_s == earlier for earlier, _ in known):
            reason = "several processes answer at this address"
        elif len(known) == MAX_RESTARTS and now_s - known[0][1] < RESTARTS_WITHIN_S:
            reason = f"changed more than {MAX_RESTARTS} times in {RESTARTS_WITHIN_S:g} s"
        if reason:
            self.ignore("incarnation", start_s, reason)
            return known[-1][0]
        self._start_times_s = [*known[1 - MAX_RESTARTS :], (start_s, now_s)]
        return start_s

    def ignore(self, name: str, value: object, reason: str = "") -> None:
        """Log that a value is ignored, once for each name."""
        if name in self._ignored:
            return
        self._ignored.add(name)
        if not reason and name in LIMITS:
            least, most = LIMITS[name]
            reason = f"not between {least:,} and {most:,}"
        log.warning(
            "node_value_ignored",
            "The router works as if the node had not reported it. It does not log further values of this name.",
            node=self._node, name=name, value=_shown(value), reason=reason,
        )  # fmt: skip


def _shown(value: object) -> str:
    """Return the start of a value. An integer of thousands of digits is not converted to text."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length():,} bits"
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}… ({len(text):,} characters)"


def decode_json(body: bytes) -> Any:
    """Raises ValueError for whatever is wrong with it: its length, bad syntax, bad UTF-8, too many nested lists."""
    if len(body) > MAX_JSON_BYTES:
        raise ValueError(f"longer than {MAX_JSON_BYTES:,} bytes")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {type(error).__name__}") from None
