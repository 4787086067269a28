"""Loads with the shape of a day for the comparison of scalers: eight hours from one quiet time to the next, with four
times as many new conversations in the middle.

    chat           chats of four turns with one of eight system prompts, on one L4 with an 8 B model
    agentic        sessions of coding agents from a trace (60 sessions of Claude Code; prompts of 82 k tokens on
                   average), repeated with other content behind the shared system prompt, on two H100s with a 32 B model
    conversation   conversations with the lengths of Mooncake's conversation trace (long-tailed; 12 k tokens on average,
                   answers of 343), on four A100s with a 70 B model

Clients wait for their answers: the next turn of a conversation follows its answer after a think time.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from warmroute.lab.engine.blocks import mix64
from warmroute.lab.workloads import Generated, parse_workload
from warmroute.lab.workloads.generators import Conversation, system_prompts
from warmroute.lab.workloads.trace import TraceBlocks
from warmroute.lab.workloads.workload_prompt import FollowUp, WorkloadPrompt

AGENT_TRACE = "traces/weka_60sessions_mooncake_format.jsonl.gz"
AGENT_ID_TOKENS = 64
MAX_PAUSE_MS = 600_000.0
MS_PER_TOKEN = 20.0
"""Of an answer, to get the think time from the time between two requests of a session."""
DAY_S = 28_800.0


class DayLoad(msgspec.Struct, frozen=True):
    workload: Any
    rate: float
    """New conversations per second, on average."""
    profile: str
    usd_per_hour: float
    objective_ms: float
    """Of the TTFT p90."""
    fixed: tuple[int, ...]
    """Fixed fleets to compare with."""
    block_size: int
    """Of the engines."""


def day_load(name: str, data: Path | None) -> DayLoad:
    if name == "chat":
        words = "multi_turn_chat systems=8 system_tokens=1500 message_tokens=700 output_tokens=800 turns=4 think_s=60"
        return DayLoad(parse_workload(words.split()), 0.1, "l4-8b", 0.8, 2000.0, (8, 9, 10, 11), 64)
    if name == "agentic":
        assert data is not None
        return DayLoad(
            Generated("agents", AgentSessions(data)), 0.005, "2xh100-32b", 5.0, 3000.0, (6, 8, 10, 12, 20), 256
        )
    return DayLoad(Generated("conversations", LongTailedChats()), 0.25, "4xa100-70b", 8.0, 8000.0, (4, 5, 6, 7, 8), 128)


@dataclass
class _LongTailedChat(Conversation):
    """The next message and answer have lengths of their own."""

    def next_prompt(self) -> WorkloadPrompt:
        self.message_tokens = min(60_000, max(20, round(self.random.lognormvariate(8.2, 1.1))))
        self.output_tokens = min(4_000, max(2, round(self.random.lognormvariate(5.4, 0.9))))
        return super().next_prompt()


class LongTailedChats(msgspec.Struct, frozen=True):
    rate: float = 1.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        systems = system_prompts("system", 4, 600)
        for number in count():
            turns = 1
            while random.random() < 0.62 and turns < 12:
                turns += 1
            yield _LongTailedChat(
                name=f"talk {number}",
                history=systems[random.randrange(4)],
                system_tokens=600,
                random=Random(random.getrandbits(64)),
                turns=turns,
                message_tokens=0,
                output_tokens=0,
                think_s=60.0,
                spread=0.0,
            ).next_prompt()


class AgentSessions(msgspec.Struct, frozen=True):
    data: Path
    rate: float = 1.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        by_session: dict[str, list[dict[str, Any]]] = {}
        with gzip.open(self.data / AGENT_TRACE) as lines:
            for line in lines:
                row = json.loads(line)
                by_session.setdefault(row["session_id"], []).append(row)
        sessions = list(by_session.values())
        seen = Counter(one for rows in sessions for one in {block for row in rows for block in row["hash_ids"]})
        shared = {block for block, times in seen.items() if times > 1}
        for number in count():
            yield _AgentSession(sessions[random.randrange(len(sessions))], number, shared).prompt(0)


class _AgentSession:
    def __init__(self, rows: list[dict[str, Any]], number: int, shared: set[int]) -> None:
        self._rows = rows
        self._number = number
        self._shared = shared
        self._pauses_ms = [
            min(MAX_PAUSE_MS, max(0.0, later["timestamp"] - row["timestamp"] - MS_PER_TOKEN * row["output_length"]))
            for row, later in pairwise(rows)
        ]

    def prompt(self, turn: int) -> WorkloadPrompt:
        row, number, shared = self._rows[turn], self._number, self._shared
        ids = [one if one in shared else mix64(one, number + 1) >> 1 for one in row["hash_ids"]]
        tokens = max(1, row["input_length"])
        return WorkloadPrompt(
            tokens,
            max(1, row["output_length"]),
            TraceBlocks(ids, AGENT_ID_TOKENS, tokens, mix64(number, turn)),
            session=b"agent %d" % number,
            next_turn=(lambda: FollowUp(self._pauses_ms[turn], self.prompt(turn + 1)))
            if turn + 1 < len(self._rows)
            else None,
        )
