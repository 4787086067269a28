"""Delivery of KV events to a listener: complete, in order, delayed, and lost as the conditions say."""

from __future__ import annotations

from small_worlds import prompt, specs

from warmroute.config import Config, Routing
from warmroute.core.node import Node
from warmroute.lab.engine.blocks import BlockRemoved, BlockStored, KvEvent
from warmroute.lab.simulated_node import Conditions, Island
from warmroute.lab.simulated_router import PolicyListener
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import World


class Recorder(PolicyListener):
    wants_kv_events = True

    def __init__(self) -> None:
        self.received: list[tuple[str, int, int, list[KvEvent], float]] = []

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        self.received.append((node.name, incarnation, sequence, events, now_s))


def held_blocks(recorder: Recorder, name: str) -> set[int]:
    blocks: set[int] = set()
    for node, _, _, events, _ in recorder.received:
        if node == name:
            for event in events:
                if isinstance(event, BlockStored):
                    blocks.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    blocks.difference_update(event.block_hashes)
    return blocks


def test_events_arrive_after_the_network_delay_and_the_lag() -> None:
    recorder = Recorder()
    world = World(specs(1), Conditions(islands={"local": Island(10.0)}, kv_lag_ms=50.0), listener=recorder)
    world.run(iter([prompt("a", tokens=160, output=1)]))
    assert not recorder.received  # the answer has arrived, the event has not
    world.calendar.run(until_ms=1000.0)
    (_, incarnation, sequence, events, at_s) = recorder.received[0]
    assert (incarnation, sequence) == (1, 0)
    assert at_s * 1000 == 5 + 160 + 5 + 50
    assert sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored)) == 10


def test_all_events_together_give_the_content_of_each_cache() -> None:
    recorder = Recorder()
    world = World(specs(3, blocks=200), Conditions(), listener=recorder)
    rag = parse_workload(["rag", "document_tokens=300", "system_tokens=100", "rate=2", "output_tokens=40"])
    world.run(rag.arrivals(3), limit=150)
    world.calendar.run(until_ms=world.calendar.now_ms + 5000)
    for name, sim in world.nodes.items():
        pool = sim.engine.scheduler.pool
        assert held_blocks(recorder, name) == set(pool._cached)
        sequences = [sequence for node, _, sequence, _, _ in recorder.received if node == name]
        assert sequences == list(range(len(sequences)))


def test_lost_batches_leave_gaps_in_the_sequence() -> None:
    recorder = Recorder()
    world = World(specs(1), Conditions(kv_loss=0.5, seed=4), listener=recorder)
    world.run(parse_workload(["unique_batch", "prompt_tokens=100", "rate=5"]).arrivals(1), limit=200)
    sent = world.nodes["node-0"].next_event_sequence
    sequences = [sequence for _, _, sequence, _, _ in recorder.received]
    assert 0.35 * sent < len(sequences) < 0.65 * sent
    assert sequences == sorted(set(sequences))


def test_a_restart_starts_a_new_sequence() -> None:
    recorder = Recorder()
    world = World(specs(1), Conditions(), listener=recorder)
    world.run(iter([prompt("a")]))
    world.restart("node-0")
    world.calendar.run(until_ms=3000.0)
    world.run(iter([prompt("b", at_ms=3000.0)]))
    world.calendar.run(until_ms=6000.0)
    first = [(incarnation, sequence) for _, incarnation, sequence, _, _ in recorder.received]
    assert (1, 0) in first
    assert (2, 0) in first


def test_engines_without_a_listener_send_no_events() -> None:
    world = World(specs(1), Conditions(), Config(routing=Routing(policy="round_robin")))
    assert world.nodes["node-0"].engine._sink is None
