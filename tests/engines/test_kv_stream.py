"""KV events over real ZMQ sockets: nothing is missed, gaps are made up for, and a flood does not hold the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from harness import until

from warmroute.engines.kv_feed import Feed
from warmroute.engines.kv_stream import KvStream, Turns

END = b"\xff" * 8


class Publisher:
    """Publishes as vLLM does, and replays from a thread of its own."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], replays: bool = True, high_water: int = 100_000
    ) -> None:
        self.live = context.socket(zmq.PUB)
        self.live.setsockopt(zmq.SNDHWM, 100_000)
        self.endpoint = f"tcp://127.0.0.1:{self.live.bind_to_random_port('tcp://127.0.0.1')}"
        self.said: list[bytes] = []
        self.replay_endpoint = ""
        self.ending = threading.Event()
        if replays:
            router = context.socket(zmq.ROUTER)
            router.setsockopt(zmq.SNDHWM, high_water)
            self.replay_endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            self.thread = threading.Thread(target=self._replay, args=(router,))
            self.thread.start()

    def publish(self, lost: bool = False) -> None:
        number = len(self.said)
        self.said.append(b"%d" % number)
        if not lost:
            self.live.send_multipart([b"topic", number.to_bytes(8, "big"), self.said[-1]])

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        while not self.ending.is_set():
            if not router.poll(20):
                continue
            who, _empty, start = router.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self.said)):
                router.send_multipart([who, b"", b"topic", number.to_bytes(8, "big"), self.said[number]])
            router.send_multipart([who, b"", b"topic", END, b""])
        router.close(0)

    def close(self) -> None:
        self.ending.set()
        if self.replay_endpoint:
            self.thread.join()
        self.live.close(0)


@contextmanager
def listening(
    replays: bool = True, said: int = 0, high_water: int = 100_000
) -> Iterator[tuple[Publisher, KvStream, list[bytes], Feed]]:
    """`said` is what was said before anybody listened."""
    context = zmq.Context[zmq.Socket[bytes]]()
    publisher = Publisher(context, replays, high_water)
    for _ in range(said):
        publisher.publish(lost=True)
    believed: list[bytes] = []
    feed = Feed(believed.append, believed.clear)
    stream = KvStream(context, feed, publisher.endpoint, publisher.replay_endpoint, "a node")
    try:
        yield publisher, stream, believed, feed
    finally:
        stream.close()
        publisher.close()
        context.destroy(0)


async def joined(publisher: Publisher, stream: KvStream) -> None:
    """Publishes until the subscription hears it."""

    def heard() -> bool:
        publisher.publish()
        return stream.heard_s > 0

    await until(heard, "the subscription")


async def test_everything_said_is_heard_what_came_before_by_replay() -> None:
    with listening() as (publisher, stream, believed, _feed):
        await joined(publisher, stream)
        for _ in range(100):
            publisher.publish()
        await until(lambda: believed == publisher.said)


async def test_a_gap_is_made_up_for_by_replay() -> None:
    with listening() as (publisher, stream, believed, feed):
        await joined(publisher, stream)
        await until(lambda: believed == publisher.said)
        publisher.publish(lost=True)
        publisher.publish(lost=True)
        publisher.publish()
        await until(lambda: believed == publisher.said)
        assert feed.gaps == 1 and not feed.incomplete


async def test_a_gap_without_replay_forgets() -> None:
    with listening(replays=False) as (publisher, stream, believed, feed):
        await joined(publisher, stream)
        await until(lambda: believed[-1:] == publisher.said[-1:])
        publisher.publish(lost=True)
        publisher.publish()
        await until(lambda: believed == publisher.said[-1:])
        assert feed.incomplete


async def test_a_restart_in_place_forgets_the_life_before() -> None:
    with listening() as (publisher, stream, believed, feed):
        await joined(publisher, stream)
        await until(lambda: believed == publisher.said)
        publisher.said.clear()
        publisher.publish()
        await until(lambda: believed == publisher.said)
        assert feed.restarts == 1
        publisher.said.clear()
        stream.restarted()
        await until(lambda: believed == [])


async def test_a_flood_of_events_does_not_hold_the_loop() -> None:
    with listening() as (publisher, stream, believed, _feed):
        await joined(publisher, stream)
        await asyncio.to_thread(lambda: [publisher.publish() for _ in range(20_000)])
        longest_s = 0.0
        while len(believed) != len(publisher.said):
            before_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before_s)
        assert believed == publisher.said
        assert longest_s < 0.03, "slices of 2 ms; all of them together take 0.1 s and more"


async def test_a_replay_that_loses_most_of_itself_is_asked_for_until_it_has_brought_everything() -> None:
    """vLLM's replay socket has ZMQ's usual mark of 1,000, and drops in silence what is above it, the end included."""
    with listening(said=2000, high_water=100) as (publisher, _stream, believed, feed):
        await until(lambda: len(believed) == 2000, patience_s=30)
        await until(lambda: not feed.replaying and feed.wants_from is None, patience_s=30)
        assert believed == publisher.said and feed.complete


async def test_what_was_said_while_the_subscription_was_on_its_way_is_asked_for() -> None:
    with listening() as (publisher, _stream, believed, feed):
        await until(lambda: not feed.replaying)
        publisher.publish(lost=True)
        await until(lambda: believed == publisher.said, patience_s=3)
        assert feed.complete and feed.gaps == 0


async def test_many_streams_share_one_slice_in_each_round_of_the_loop() -> None:
    turns = Turns()
    calls = 0

    def busy(until_s: float) -> bool:
        nonlocal calls
        calls += 1
        while time.monotonic() < until_s:
            pass
        return calls < 40

    workers = [lambda until_s: busy(until_s) for _ in range(20)]
    for worker in workers:
        turns.want(worker)
    while calls < 40:
        before = calls
        await asyncio.sleep(0)
        assert calls <= before + 2, "one after another, not all of them at once"
