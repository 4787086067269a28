"""Collects a request body from the pieces in which it arrives, within the limits on size and memory.

All bodies share `limits.buffered_bytes`. Each tenant may take at most half of what the others leave, so a tenant that
fills its share leaves room for the next one. A tenant that needs more than is left ends incomplete bodies of tenants
that have more than itself. In the end, n tenants that want all they can get have 1 / (n + 1) of the memory each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from warmroute._kernel import BodyBuffer
from warmroute.edge import errors
from warmroute.edge.http1 import BadChunk, ChunkReader

if TYPE_CHECKING:
    from warmroute.edge.listener import Listener

_BURST_BYTES: Final = 1 << 20


class BodyMemory:
    """The memory of request bodies, by tenant."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.by_tenant: dict[str, int] = {}
        """Of tenants that share the memory: `Rights.body_tenant`."""
        self._incomplete: dict[str, dict[Any, int]] = {}
        """Connections or streams whose body is arriving, by tenant, and how much of it has arrived. They have a method
        `give_way`."""

    def reserve(self, tenant: str | None, size: int, limit: int) -> None:
        """Count bytes of a body. Raises HttpError if the limit on all bodies, or on this tenant's, is reached."""
        if tenant is None:
            if self.total_bytes + size > limit:
                raise errors.request_buffer_full()
        else:
            own = self.by_tenant.get(tenant, 0)
            if own + size > (limit - self.total_bytes + own) // 2:
                self._make_room(tenant, size, limit)
            self.by_tenant[tenant] = own + size
        self.total_bytes += size

    def has_room(self, tenant: str | None, size: int, limit: int) -> bool:
        """Return whether `reserve` would succeed without ending other bodies."""
        if tenant is None:
            return self.total_bytes + size <= limit
        own = self.by_tenant.get(tenant, 0)
        return own + size <= (limit - self.total_bytes + own) // 2

    def release(self, tenant: str | None, size: int) -> None:
        self.total_bytes -= size
        if tenant is not None and size:
            left = self.by_tenant[tenant] - size
            if left:
                self.by_tenant[tenant] = left
            else:
                del self.by_tenant[tenant]

    def arrives(self, tenant: str | None, receiver: Any, size: int) -> None:
        """So much of this body has arrived, and it is not complete."""
        if tenant is not None:
            self._incomplete.setdefault(tenant, {})[receiver] = size

    def arrived(self, tenant: str | None, receiver: Any) -> None:
        """The body is complete, or given up."""
        if tenant is not None and (incomplete := self._incomplete.get(tenant)) is not None:
            incomplete.pop(receiver, None)
            if not incomplete:
                del self._incomplete[tenant]

    def _make_room(self, tenant: str, size: int, limit: int) -> None:
        """Raises HttpError."""
        while not self.has_room(tenant, size, limit):
            wanted = self.by_tenant.get(tenant, 0) + size
            held = {name: held for name, held in self.by_tenant.items() if held > wanted}
            from_whom = max(held.keys() & self._incomplete.keys(), key=held.__getitem__, default=None)
            if from_whom is None:
                raise errors.request_buffer_full() if held else errors.tenant_buffer_full()
            incomplete = self._incomplete[from_whom]
            receiver = max(incomplete, key=incomplete.__getitem__)
            self.arrived(from_whom, receiver)
            receiver.give_way()


class BodyReader:
    __slots__ = ("_burst_bytes", "_data", "_frames", "_listener", "_missing_bytes", "held_bytes", "tenant")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._data = BodyBuffer()
        self._burst_bytes = 0
        self._frames: ChunkReader | None = None
        self._missing_bytes = 0
        """Of a chunked body: how many more bytes the limit allows."""
        self.tenant: str | None = ""
        """Whose share of the memory this body takes from."""
        self.held_bytes = 0
        """This body's part of `listener.bodies`."""

    def start(self, length: int) -> None:
        """Expect a body of this length; a negative length: a chunked body."""
        if length >= 0:
            self._frames = None
            self._missing_bytes = length
        else:
            self._frames = ChunkReader()
            self._missing_bytes = self._listener.limits.body_bytes

    def feed(self, data: bytes) -> int:
        """Add bytes. Return how many of them belong to the body if it ends in them, else -1. Raises HttpError."""
        frames = self._frames
        if frames is None:
            end = min(len(data), self._missing_bytes)
            payload = data if end == len(data) else data[:end]
            self.reserve(end)
            self._missing_bytes -= end
            if self._missing_bytes:
                end = -1
        else:
            pieces: list[bytes] = []
            try:
                end = frames.feed(data, pieces)
            except BadChunk as bad:
                raise errors.bad_request(f"The chunked body is malformed: {bad}.") from None
            payload = b"".join(pieces)
            self._missing_bytes -= len(payload)
            if self._missing_bytes < 0:
                raise errors.body_too_large(self._listener.limits.body_bytes)
            self.reserve(len(payload))
        self._data.append(payload, 0 if frames is not None else self._missing_bytes)
        self._burst_bytes += len(data)
        return end

    def ends_burst(self) -> bool:
        """Return whether so much has arrived that other connections should have their turn: the event loop would read
        8 MB of one connection at once, which takes up to 20 ms."""
        if self._burst_bytes < _BURST_BYTES:
            return False
        self._burst_bytes = 0
        return True

    def take(self) -> bytes:
        """Return the complete body. Its memory stays counted until `release`."""
        return self._data.take()

    def reserve(self, size: int) -> None:
        """Count bytes against the memory limit of all bodies. Raises HttpError if it is reached."""
        listener = self._listener
        bodies, limit = listener.bodies, listener.limits.buffered_bytes
        if self.tenant is None and bodies.total_bytes + size <= limit:
            bodies.total_bytes += size  # without a call: most routers have one tenant
        else:
            bodies.reserve(self.tenant, size, limit)
        self.held_bytes += size

    def release(self) -> None:
        """The body is no longer needed."""
        if self.held_bytes:
            self._listener.bodies.release(self.tenant, self.held_bytes)
            self.held_bytes = 0
        if self._data:
            self._data.take()
