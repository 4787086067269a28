from collections.abc import Mapping
from typing import Any

from warmroute._kernel.accounting import NodeState

class PeerRow:
    """What one peer published last about one node, as it is counted in the node's figures."""

    @property
    def node(self) -> NodeState: ...
    @property
    def inflight(self) -> int:
        """The peer's requests on the node."""
    def clear(self) -> None:
        """Count nothing of the peer's load any more."""

def check_load_rows(data: bytes, rows: int, /) -> bool:
    """Return whether the bytes are this many rows, and all numbers are within their bounds."""

def apply_load_rows(
    rows: dict[str, PeerRow],
    nodes: Mapping[str, NodeState],
    caches: Mapping[str, Any],
    names: tuple[str, ...],
    data: bytes,
    now_s: float,
    from_start: bool,
    min_answers: int,
    sent_s: float,
    /,
) -> list[Any]:
    """Count the rows that a peer published; `data` has one for each of `names`, and was checked. Return the nodes that
    have less work than before.

    `rows`: the peer's rows by node, which it adds to. `nodes` and `caches`: dicts of this process's nodes, with their
    `groups`, and of their caches. `from_start`: the peer's totals began at 0 while this process listened. A node that
    was not measured here takes the peer's speed if the peer learned it from `min_answers`. `sent_s`: when the peer
    sent the message, by its clock."""

def pack_load_rows(
    nodes: Mapping[str, NodeState], caches: Mapping[str, Any], full: bool, most: int, /
) -> tuple[tuple[str, ...], bytes]:
    """Return names and rows of the nodes whose figures have changed since the last call; with `full`, also of those
    with requests of this process. At most `most`; the others follow with the next call."""
