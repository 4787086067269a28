"""Prefill nodes that serve whole requests while they have nothing else to do. No I/O.

A role is a preference with a price. On an idle prefill node, a long prompt needs no transfer, and a short one does not
wait for the batch of a decode node. But the node prefills for no other one until the answer ends, since that would stop
the answer (Node.whole_answers, admission.py). The price of a node alone gets one more term:

    blocking = P(more long prompts come during the answer than other prefill nodes are idle)                    [ms]
             · wait of the first one of them / (1 − busy^nodes)
             + answer · prompts in the queue / nodes

    wait     until half of the answer is over, or a prefill on one of the other nodes ends
    busy     share of their time that long prompts and this answer keep the prefill nodes busy

On busy prefill nodes one delay makes others; with several nodes only if all of them are busy. The arrivals of long
prompts (fleet/long_prompts.py) are those of this process, and so are the answers that block a node: with several
processes, prefill nodes serve no whole requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from warmroute.fleet.group import Group
from warmroute.fleet.node import Node

ANSWER_LEFT: Final = 0.5
"""The share of an answer that is left on average when a prompt comes."""
MAX_BUSY: Final = 0.99
MAX_OTHERS: Final = 8
"""More idle nodes than this make no difference."""
PATIENCE: Final = 2.0
"""An answer blocks its node for at most this many times as long as it is expected to take."""


def idle_nodes(nodes: Sequence[Node], island: str) -> int:
    """Return how many prefill nodes of an island have no request and could serve whole ones."""
    return sum([not node.load and is_prefill_node(node, island) for node in nodes])


def is_prefill_node(node: Node, island: str) -> bool:
    return node.role == "prefill" and node.island == island and node.can_serve_alone


def blocking_ms(group: Group, answer_ms: float, others: int, now_s: float) -> float:
    """Return what it costs long prompts that a prefill node decodes an answer, if `others` more are idle."""
    per_ms, busy_nodes = group.long_prompts.recent(now_s)
    if per_ms <= 0.0 or answer_ms <= 0.0:
        return 0.0
    nodes = len(group.prefill_nodes)
    expected = per_ms * answer_ms
    chance = enough = math.exp(-expected)
    for count in range(1, min(others, MAX_OTHERS) + 1):
        chance *= expected / count
        enough += chance
    wait_ms = ANSWER_LEFT / (1.0 / answer_ms + (nodes - 1) * per_ms / busy_nodes)
    busy = min(MAX_BUSY, (busy_nodes + expected) / nodes)
    return max(0.0, 1.0 - enough) * wait_ms / (1.0 - busy**nodes) + answer_ms * group.waiting / nodes
