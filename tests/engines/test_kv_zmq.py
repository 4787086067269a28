"""KV events over real ZMQ sockets: none is missed, gaps are replayed, and a flood does not block the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from support.polling import until

from warmroute.engines.kv_events import EventSequence
from warmroute.engines.kv_subscription import KvSubscription, SliceScheduler

END = b"\xff" * 8


class Publisher:
    """Publishes as vLLM does, and replays from its own thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], replays: bool = True, high_water: int = 100_000
    ) -> None:
        self.live = context.socket(zmq.PUB)
        self.live.setsockopt(zmq.SNDHWM, 100_000)
        self.endpoint = f"tcp://127.0.0.1:{self.live.bind_to_random_port('tcp://127.0.0.1')}"
        self.messages: list[bytes] = []
        self.replay_endpoint = ""
        self.stopping = threading.Event()
        if replays:
            router = context.socket(zmq.ROUTER)
            router.setsockopt(zmq.SNDHWM, high_water)
            self.replay_endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            self.thread = threading.Thread(target=self._replay, args=(router,))
            self.thread.start()

    def publish(self, lost: bool = False) -> None:
        number = len(self.messages)
        self.messages.append(b"%d" % number)
        if not lost:
            self.live.send_multipart([b"topic", number.to_bytes(8, "big"), self.messages[-1]])

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        while not self.stopping.is_set():
            if not router.poll(20):
                continue
            who, _empty, start = router.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self.messages)):
                router.send_multipart([who, b"", b"topic", number.to_bytes(8, "big"), self.messages[number]])
            router.send_multipart([who, b"", b"topic", END, b""])
        router.close(0)

    def close(self) -> None:
        self.stopping.set()
        if self.replay_endpoint:
            self.thread.join()
        self.live.close(0)


class RecordedRank:
    """Takes the place of RankEvents, and records the messages."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.sequence = EventSequence[bytes](self.applied.append, self.applied.clear)
        self.received = 0
        self.log_fields = {"node": "node", "rank": 0}

    def receive(self, number: int, payload: bytes) -> None:
        self.received += 1
        self.sequence.receive(number, payload)

    def work(self, until_s: float) -> bool:
        return False


@contextmanager
def subscribing(
    replays: bool = True, earlier: int = 0, high_water: int = 100_000
) -> Iterator[tuple[Publisher, KvSubscription, RecordedRank]]:
    """`earlier` messages are published before the subscription."""
    context = zmq.Context[zmq.Socket[bytes]]()
    publisher = Publisher(context, replays, high_water)
    for _ in range(earlier):
        publisher.publish(lost=True)
    rank = RecordedRank()
    subscription = KvSubscription(rank, publisher.endpoint, publisher.replay_endpoint)  # type: ignore[arg-type]
    try:
        yield publisher, subscription, rank
    finally:
        subscription.close()
        publisher.close()
        context.destroy(0)


async def subscribed(publisher: Publisher, rank: RecordedRank) -> None:
    """Publish until a live message arrives."""

    def received() -> bool:
        publisher.publish()
        return rank.received > 0

    await until(received, "the subscription")


async def test_all_messages_arrive_and_earlier_ones_are_replayed() -> None:
    with subscribing() as (publisher, _subscription, rank):
        await subscribed(publisher, rank)
        for _ in range(100):
            publisher.publish()
        await until(lambda: rank.applied == publisher.messages)


async def test_a_gap_is_filled_by_replay() -> None:
    with subscribing() as (publisher, _subscription, rank):
        await subscribed(publisher, rank)
        await until(lambda: rank.applied == publisher.messages)
        publisher.publish(lost=True)
        publisher.publish(lost=True)
        publisher.publish()
        await until(lambda: rank.applied == publisher.messages)
        assert rank.sequence.complete


async def test_a_gap_without_replay_forgets_earlier_messages() -> None:
    with subscribing(replays=False) as (publisher, _subscription, rank):
        await subscribed(publisher, rank)
        await until(lambda: rank.applied[-1:] == publisher.messages[-1:])
        publisher.publish(lost=True)
        publisher.publish()
        await until(lambda: rank.applied == publisher.messages[-1:])
        assert rank.sequence.incomplete


async def test_a_restart_forgets_earlier_messages() -> None:
    with subscribing() as (publisher, subscription, rank):
        await subscribed(publisher, rank)
        await until(lambda: rank.applied == publisher.messages)
        publisher.messages.clear()
        publisher.publish()
        await until(lambda: rank.applied == publisher.messages)
        publisher.messages.clear()
        rank.sequence.restart()
        subscription.read_from_start()
        await until(lambda: rank.applied == [])


async def test_a_flood_of_messages_does_not_block_the_event_loop() -> None:
    with subscribing() as (publisher, _subscription, rank):

        def publish_many() -> None:
            for _ in range(20_000):
                publisher.publish()

        await subscribed(publisher, rank)
        await asyncio.to_thread(publish_many)
        longest_s = 0.0
        while len(rank.applied) != len(publisher.messages):
            before_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before_s)
        assert rank.applied == publisher.messages
        assert longest_s < 0.03, "slices take 2 ms; all messages together take 0.1 s and more"


async def test_a_lossy_replay_is_repeated_until_all_messages_arrived() -> None:
    """vLLM's replay socket has ZMQ's default high-water mark of 1,000 and silently drops messages above it."""
    with subscribing(earlier=2000, high_water=100) as (publisher, _subscription, rank):
        await until(lambda: len(rank.applied) == 2000, patience_s=30)
        await until(lambda: not rank.sequence.replaying and rank.sequence.missing_from is None, patience_s=30)
        assert rank.applied == publisher.messages and rank.sequence.complete


async def test_messages_sent_while_subscribing_are_replayed() -> None:
    with subscribing() as (publisher, _subscription, rank):
        await until(lambda: not rank.sequence.replaying)
        publisher.publish(lost=True)
        await until(lambda: rank.applied == publisher.messages, patience_s=3)
        assert rank.sequence.complete


async def test_all_subscriptions_share_one_slice_of_each_loop_iteration() -> None:
    scheduler = SliceScheduler()
    calls = 0

    def busy(until_s: float) -> bool:
        nonlocal calls
        calls += 1
        while time.monotonic() < until_s:
            pass
        return calls < 40

    workers = [lambda until_s: busy(until_s) for _ in range(20)]
    for worker in workers:
        scheduler.add(worker)
    while calls < 40:
        before = calls
        await asyncio.sleep(0)
        assert calls <= before + 2, "one worker after another, not all at once"
