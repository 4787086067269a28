"""The router's own traffic of the last minutes, for scaling by replay: lengths and hashes, never text.

It is a sink of the capture (app/capture.py), which hands over a line for each request that has ended. Memory is
bounded by MAX_BYTES. A router with more traffic than that keeps half of the conversations, then a quarter, and so on:
whole conversations, so that caches work in a replay as they do for the rest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

MAX_BYTES: Final = 32 << 20
"""Memory for the recorded requests."""
LINE_BYTES: Final = 200
"""What a line takes in memory besides its characters."""
BLOCK_TOKENS: Final = 64
"""Tokens for each hash of a prompt."""
MAX_TURNS: Final = 20_000
"""Prompts that are remembered to find the conversation that a prompt continues."""
_MASK: Final = (1 << 32) - 1


class _Row(msgspec.Struct, gc=False):
    """The fields of a line that this module needs (core/trace_row.py)."""

    timestamp: float
    input_length: int
    hash_ids: list[int] = []
    follows: int = 0


class RecentLine(msgspec.Struct, gc=False):
    at_ms: float
    conversation: int
    text: bytes


class RecentTraffic:
    """The recent requests, as lines of JSON. One thread writes them, another one reads."""

    def __init__(self, window_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.path = Path("scaling.replay")
        self._now = now
        self.started_s = now()
        """The zero of the lines' times."""
        self.window_s = window_s
        self.share = 1.0
        """The fraction of the conversations that is kept."""
        self._before = 1.0
        """The fraction before `share` last rose. Lines of that time, of fewer conversations, may still be in the
        window."""
        self._changed_ms = 0.0
        self._lines: deque[RecentLine] = deque()
        self._bytes = 0
        self._turns: dict[tuple[int, int], int] = {}
        """The conversation of each prompt, by the id of its last full block and its length."""
        self._decoder = msgspec.json.Decoder(_Row)
        self._count = 0
        self._lock = threading.Lock()

    def write(self, lines: bytes) -> None:
        """Add requests that have ended, one JSON object a line."""
        with self._lock:
            for text in lines.splitlines():
                if text:
                    self._add(text)
            self._forget_old()
            # Halving, not evicting: the window keeps its length, which a replay needs more than every conversation.
            while self._bytes > MAX_BYTES:
                self._thin()
            if self.share < 1.0:
                self._thicken()

    def _add(self, text: bytes) -> None:
        row = self._decoder.decode(text)
        conversation = self._conversation(row)
        if self._keeps(conversation):
            self._lines.append(RecentLine(row.timestamp, conversation, text))
            self._bytes += len(text) + LINE_BYTES

    def _conversation(self, row: _Row) -> int:
        """Return the number of the conversation: that of the prompt that this one continues, or a new one."""
        ids, turns = row.hash_ids, self._turns
        found = None
        if 0 < row.follows // BLOCK_TOKENS <= len(ids):
            found = turns.get((ids[row.follows // BLOCK_TOKENS - 1], row.follows))
        if found is None:
            self._count += 1
            # Knuth's multiplicative hash: consecutive numbers spread evenly, so a threshold keeps every second
            # conversation and not the older half.
            found = self._count * 2_654_435_761 & _MASK  # spread over 32 bits
        if ids:
            key = ids[-1], row.input_length
            turns.pop(key, None)
            turns[key] = found
            if len(turns) > MAX_TURNS:
                del turns[next(iter(turns))]
        return found

    def _keeps(self, conversation: int) -> bool:
        return conversation <= self.share * _MASK

    def _forget_old(self) -> None:
        lines, since_ms = self._lines, self._now_ms() - 1000.0 * self.window_s
        while lines and lines[0].at_ms < since_ms:
            self._bytes -= len(lines.popleft().text) + LINE_BYTES

    def _thin(self) -> None:
        self.share /= 2.0
        self._lines = deque(line for line in self._lines if self._keeps(line.conversation))
        self._bytes = sum(len(line.text) + LINE_BYTES for line in self._lines)
        self._before, self._changed_ms = self.share, self._now_ms()

    def _thicken(self) -> None:
        """Keep more conversations again if a whole window took little memory."""
        now_ms = self._now_ms()
        if self._bytes < MAX_BYTES / 4 and now_ms - self._changed_ms > 1000.0 * self.window_s:
            self._before, self._changed_ms = self.share, now_ms
            self.share = min(1.0, 2.0 * self.share)

    def _now_ms(self) -> float:
        return 1000.0 * (self._now() - self.started_s)

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def recorded_s(self) -> float:
        """Time since the first of the lines' requests arrived."""
        try:
            first_ms = self._lines[0].at_ms
        except IndexError:
            return 0.0
        return min(self.window_s, max(0.0, self._now_ms() - first_ms) / 1000.0)

    def snapshot(self) -> tuple[list[RecentLine], float, float]:
        """Return the lines, the share of the conversations, and the time now, in the lines' own time. It takes one copy
        of a list, because the event loop waits meanwhile: `framed` leaves out lines beyond the share and the window."""
        with self._lock:
            self._forget_old()
            now_ms = self._now_ms()
            share = self.share if now_ms - self._changed_ms > 1000.0 * self.window_s else min(self.share, self._before)
            return list(self._lines), share, now_ms


def framed(lines: Sequence[RecentLine], share: float = 1.0, since_ms: float = 0.0) -> Iterator[bytes]:
    """Return the lines of this share of the conversations as the searching process reads them: the conversation, a
    space, the JSON object. Requests that arrived before `since_ms` are left out: one that took an hour is recorded when
    it has ended, and would be the beginning of the recorded time."""
    for one in lines:
        if one.conversation <= share * _MASK and one.at_ms >= since_ms:
            yield b"%d %s\n" % (one.conversation, one.text)
