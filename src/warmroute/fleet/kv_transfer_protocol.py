"""What the KV transfer protocol of an engine does: one file in engines/ for each."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final, Protocol

from warmroute.fleet.node import Node

MAX_PARAMETERS_BYTES: Final = 1 << 20
"""Longer parameters of a prefill node are ignored. Block ids of 100,000 tokens take about 50 KB."""


class KvTransfer(Protocol):
    """The fields that the prefill request and the decode request have beside the client's: JSON text by name."""

    def prefill_fields(self, fields: Container[str], prefill_node: Node, room: int) -> Mapping[str, bytes]:
        """`fields`: those of the client's body. `room`: a random number, the same for both requests."""

    def decode_fields(
        self, fields: Container[str], prefill_node: Node, room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        """`transfer`: what `read_transfer` returned; None if the protocol sends both requests at the same time."""

    def read_transfer(self, response: bytes) -> bytes | None:
        """Return what the prefill node's response says about its KV cache; None if it says nothing valid."""
