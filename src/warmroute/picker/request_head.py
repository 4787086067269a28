"""Turns the headers that Envoy sends into the request head that the HTTP edge would have read.

Envoy has parsed the request and frames it again for the node, so its framing headers say nothing here. The rest goes
through the same strict parser as a client's own bytes: the same headers are rejected, and the same ones are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from warmroute.edge import errors
from warmroute.edge.http1 import RequestHead, read_request_head

OBJECTIVES: Final = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
"""Name the InferenceObjective of a request, which has its priority: the extension's header, and llm-d's newer name."""
MODEL: Final = "x-gateway-model-name"
"""The model, where a filter in front has read the body."""
_FRAMING: Final = frozenset({"content-length", "transfer-encoding", "connection", "expect", "host", "te", "upgrade"})


class EnvoyHead:
    """A request's head, and what only the picker reads of it."""

    __slots__ = ("body_bytes", "head", "model", "rank_given")

    def __init__(self, fields: Iterable[Any], objectives: Mapping[str, str], limit: int) -> None:
        """`objectives`: the priority of each InferenceObjective, as X-Priority has it. `limit`: of the head's bytes.
        Raises HttpError."""
        method = path = b""
        authority = b"envoy"
        lines: list[bytes] = []
        self.model = ""
        self.body_bytes = 0
        self.rank_given = False
        """Whether the client names a data-parallel rank, which only the router may do."""
        objective = ""
        has_priority = False
        for field in fields:
            name, value = field.key, field.raw_value or field.value.encode("utf-8", "surrogateescape")
            if name[:1] == ":":
                if name == ":path":
                    path = value
                elif name == ":method":
                    method = value
                elif name == ":authority" and value:
                    authority = value
                continue
            if name in _FRAMING:
                if name == "content-length" and value.isdigit() and len(value) < 19:
                    self.body_bytes = int(value)
                continue
            if name in OBJECTIVES:
                objective = value.decode("latin-1")
            elif name == MODEL:
                self.model = value.decode("utf-8", "replace")
            elif name == "x-priority":
                has_priority = True
            elif name == "x-data-parallel-rank":
                self.rank_given = True
            lines.append(b"%b: %b\r\n" % (name.encode("latin-1", "replace"), value))
        if not has_priority and (priority := objectives.get(objective, "")):
            lines.append(b"x-priority: %b\r\n" % priority.encode())
        data = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, path, authority, b"".join(lines))
        if len(data) > limit:
            raise errors.headers_too_large(limit)
        if data.count(b"\n") != len(lines) + 3 or data.count(b"\r") != len(lines) + 3:
            raise errors.bad_request("A header contains a line break.")
        self.head: RequestHead = read_request_head(data, len(data) - 4)
