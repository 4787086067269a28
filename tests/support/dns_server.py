"""A DNS server on loopback, over UDP and TCP, whose records a test changes while it runs."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from support.free_port import free_port


class DnsServer:
    def __init__(self) -> None:
        self.port = free_port()
        self.records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        """By name and type: the TTL, and the records' texts."""
        self.rcode = dns.rcode.NOERROR
        """Answer of all questions, if it is an error."""
        self.is_silent = False
        self.asked: list[tuple[str, str]] = []
        self.over_tcp = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, name: str, kind: str, *records: str, ttl_s: int = 1) -> None:
        self.records[f"{name}.", kind] = ttl_s, list(records)

    def answer(self, wire: bytes, max_bytes: int) -> bytes:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = str(question.name), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        response = dns.message.make_response(query)
        response.set_rcode(self.rcode)
        if not self.rcode:
            ttl_s, texts = self.records.get((name, kind), (0, []))
            if texts:
                response.answer.append(dns.rrset.from_text(question.name, ttl_s, dns.rdataclass.IN, kind, *texts))
            elif not any(known == name for known, _kind in self.records):
                response.set_rcode(dns.rcode.NXDOMAIN)
        data = response.to_wire(max_size=65_535)
        if len(data) > max_bytes:
            response.answer.clear()
            response.flags |= dns.flags.TC
            data = response.to_wire()
        return data


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        if not self._server.is_silent:
            self._transport.sendto(self._server.answer(data, 1232), address)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    server = DnsServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            data = server.answer(await reader.readexactly(length), 65_535)
            server.over_tcp += 1
            writer.write(struct.pack("!H", len(data)) + data)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    loop = asyncio.get_running_loop()
    listener = await asyncio.start_server(serve, "127.0.0.1", server.port)
    transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(server), ("127.0.0.1", server.port))
    try:
        yield server
    finally:
        transport.close()
        listener.close()
