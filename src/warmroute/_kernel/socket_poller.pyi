from collections.abc import Callable, Sequence
from socket import socket
from typing import Any

from warmroute._kernel.http_chunks import ChunkReader

class SocketPoller:
    """Reads and writes plain sockets. Watch `fileno` in an event loop, and call `poll` when it is readable."""

    def __new__(cls, call_soon: Callable[[Callable[[], None]], object]) -> SocketPoller:
        """`call_soon`: the event loop's."""
    def fileno(self) -> int: ...
    def poll(self) -> None:
        """Handle the sockets that are ready: call their protocols, then send what these have written."""
    def open(self, fd: int, protocol: Any, /) -> SocketTransport:
        """Serve a connected socket, which does not block. The transport closes it. Raises OSError."""
    def listen(
        self, listening: socket, factory: Callable[[], Any], on_failure: Callable[[int], object], /
    ) -> ListeningSocket:
        """Accept connections: `factory` creates the protocol of each. `on_failure` gets the error number if this
        process cannot accept any, for example because it has too many open files."""
    def close(self) -> None:
        """Close all connections, without a call of their protocols."""

class ListeningSocket:
    """A socket whose connections a SocketPoller accepts."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None:
        """Accept nothing any more. The socket itself stays open."""

class SocketTransport:
    """A connection that a SocketPoller reads and writes: an asyncio.Transport without its rarely used methods.

    Bytes that are written while the poller handles events are sent at the end of that, at once for each connection.
    """

    last_read_s: float
    """When bytes last arrived, on the monotonic clock; or 0."""

    def write(self, data: bytes, /) -> None: ...
    def writelines(self, lines: Sequence[bytes], /) -> None: ...
    def write_eof(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def get_write_buffer_size(self) -> int: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def relay(self, to: SocketTransport, chunks: ChunkReader, keep: Callable[[bytes], object] | None, /) -> None:
        """Pass what arrives to another transport, and to `keep`, without a call of the protocol: until the chunked
        message that `chunks` follows ends or is malformed, or the connection ends. The protocol gets that."""
    def stop_relay(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def get_extra_info(self, name: str, default: object = None, /) -> Any:
        """Return `peername` or `sockname`."""
    def count_unread(self, unread: UnreadBytes, /) -> None:
        """Count what is written from now on until the other side has read it. Once, before the first write."""
    def reset_on_close(self) -> None:
        """Close with a TCP reset, later."""

class UnreadBytes:
    """What the clients of a listener have not read, in bytes of memory: pieces that are partly sent count whole."""

    bytes: int
    """Read only."""
    limit: int

    def __new__(cls, limit: int, on_excess: Callable[[], object]) -> UnreadBytes:
        """`on_excess` is called, perhaps often, while there is more than the limit."""
    def slowest(self) -> Any:
        """Return the protocol of the counted transport whose client read 64 KB, or had read all, the longest time ago;
        None if all clients have read everything."""
    def add(self, change: int, /) -> None:
        """Count bytes that something else than a SocketTransport holds; a negative number: they are read."""
