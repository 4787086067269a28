"""SGLang's KV transfer: both requests name the prefill node's bootstrap server and a room, and are sent at once.

The two engines meet in the room: the prefill engine pushes the KV cache, and the decode engine begins to answer. A
decode engine (`--disaggregation-mode decode`) cannot prefill: it waits until the prefill engine has sent its KV cache.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from warmroute.fleet.node import Node


class SglangKvTransfer:
    def prefill_fields(self, fields: Container[str], prefill_node: Node, room: int) -> Mapping[str, bytes]:
        return self._fields(prefill_node, room)

    def decode_fields(
        self, fields: Container[str], prefill_node: Node, room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        return self._fields(prefill_node, room)

    def read_transfer(self, response: bytes) -> bytes | None:
        return b"{}"

    @staticmethod
    def _fields(prefill_node: Node, room: int) -> Mapping[str, bytes]:
        host = prefill_node.host
        return {
            "bootstrap_host": msgspec.json.encode(f"[{host}]" if ":" in host else host),
            "bootstrap_port": b"%d" % prefill_node.config.bootstrap_port,
            "bootstrap_room": b"%d" % room,
        }
