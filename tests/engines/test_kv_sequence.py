"""Sequence numbers of KV events: gaps, replays and restarts. No message is missed; lost ones leave no stale blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmroute.engines.kv_events import EventSequence


class Engine:
    """Publishes numbered messages and keeps them for replay."""

    def __init__(self, process: bytes = b"") -> None:
        self.buffer: list[bytes] = []
        self.process = process

    def publish(self) -> tuple[int, bytes]:
        self.buffer.append(b"%b%d" % (self.process, len(self.buffer)))
        return len(self.buffer) - 1, self.buffer[-1]


class Subscriber:
    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.sequence = EventSequence[bytes](self.applied.append, self.applied.clear)

    def replay(self, engine: Engine, oldest: int = 0) -> None:
        start = self.sequence.missing_from
        if start is not None:
            self.sequence.start_replay()
            for number in range(max(start, oldest), len(engine.buffer)):
                self.sequence.receive_replayed(number, engine.buffer[number])
            self.sequence.end_replay()


@given(st.lists(st.sampled_from(["arrives", "lost", "restart", "restart known"]), max_size=60))
def test_after_a_replay_all_messages_are_applied_in_order(events: list[str]) -> None:
    engine, subscriber = Engine(), Subscriber()
    for event in [*events, "arrives"]:
        if event == "restart":
            engine = Engine(engine.process + b"later ")
            continue
        if event == "restart known":
            engine = Engine(engine.process + b"later ")
            subscriber.sequence.restart()
            continue
        number, payload = engine.publish()
        if event == "arrives":
            subscriber.sequence.receive(number, payload)
            subscriber.replay(engine)
            if number >= 1 or "restart" not in events:
                assert subscriber.applied[-1] == payload
    # Only a number that is not above the last shows a restart. Until then the two processes look like one.
    if "restart" not in events:
        assert subscriber.applied == engine.buffer


def test_a_lower_number_means_a_restart() -> None:
    engine, subscriber = Engine(), Subscriber()
    for _ in range(5):
        subscriber.sequence.receive(*engine.publish())
    engine = Engine()
    subscriber.sequence.receive(*engine.publish())
    assert subscriber.applied == [b"0"]


def test_a_gap_without_replay_forgets_earlier_messages() -> None:
    subscriber = Subscriber()
    subscriber.sequence.receive(0, b"0")
    subscriber.sequence.receive(3, b"3")
    assert subscriber.applied == [b"0"] and subscriber.sequence.missing_from == 1
    subscriber.sequence.skip_missing()
    assert subscriber.applied == [b"3"] and subscriber.sequence.incomplete


def test_a_replay_that_lacks_the_missing_messages_forgets_earlier_ones() -> None:
    engine, subscriber = Engine(), Subscriber()
    subscriber.sequence.receive(*engine.publish())
    for _ in range(4):
        last = engine.publish()
    subscriber.sequence.receive(*last)
    subscriber.replay(engine, oldest=3)
    assert subscriber.applied == [b"3", b"4"] and subscriber.sequence.incomplete


def test_a_live_message_that_a_replay_brought_first_is_no_restart() -> None:
    engine, subscriber = Engine(), Subscriber()
    messages = [engine.publish() for _ in range(6)]
    subscriber.sequence.receive(*messages[3])
    subscriber.replay(engine)
    for number, payload in messages[4:]:
        subscriber.sequence.receive(number, payload)
    subscriber.sequence.receive(*engine.publish())
    assert subscriber.applied == engine.buffer
    subscriber.sequence.receive(2, b"another process")
    assert subscriber.applied == []


def test_live_messages_during_a_replay_are_applied_once_after_it() -> None:
    engine, subscriber = Engine(), Subscriber()
    for _ in range(3):
        last = engine.publish()
    subscriber.sequence.receive(*last)
    subscriber.sequence.start_replay()
    subscriber.sequence.receive(*engine.publish())
    for number, payload in enumerate(engine.buffer):
        subscriber.sequence.receive_replayed(number, payload)
    subscriber.sequence.end_replay()
    assert subscriber.applied == engine.buffer


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.lists(st.lists(st.booleans(), max_size=40), max_size=6),
    st.integers(0, 10),
)
def test_lossy_replays_never_leave_a_gap_in_what_was_applied(
    arrives: list[bool], drops: list[list[bool]], oldest: int
) -> None:
    """Whatever the live stream and the replays lose: the applied messages are the latest ones without a gap, and all
    messages if the sequence is complete."""
    engine, subscriber = Engine(), Subscriber()
    sequence = subscriber.sequence
    rounds = iter(drops)
    for arrived in [*arrives, True]:
        number, payload = engine.publish()
        if arrived:
            sequence.receive(number, payload)
        for _ in range(100):
            start = sequence.missing_from
            if start is None:
                break
            sequence.start_replay()
            dropped = next(rounds, [])
            for at in range(max(start, oldest), len(engine.buffer)):
                if not (at < len(dropped) and dropped[at]) or at == max(start, oldest):
                    sequence.receive_replayed(at, engine.buffer[at])
            sequence.end_replay(finished=not dropped[-1:])
        assert sequence.missing_from is None, "it ends"
    assert subscriber.applied == engine.buffer[len(engine.buffer) - len(subscriber.applied) :]
    assert not sequence.complete or subscriber.applied == engine.buffer
