"""A running picker, and a client that talks to it as Envoy does."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from support.polling import until
from support.running_router import count_up, quick_table
from support.scripted_engine import BlackHole, ScriptedEngine
from warmroute.app.commands.serve import picker_factory
from warmroute.app.service import Service
from warmroute.config import from_table
from warmroute.edge.envoy import ext_proc
from warmroute.edge.envoy.ext_proc import BUFFERED, NONE, STREAMED
from warmroute.edge.envoy.ext_proc import FULL_DUPLEX_STREAMED as DUPLEX
from warmroute.edge.envoy.server import PickerServer
from warmroute.edge.envoy.stream import EnvoyExchange

MODES = {"buffered": BUFFERED, "duplex": DUPLEX, "streamed": STREAMED, "none": NONE}


def chat_body(text: str = "hello", **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


def headers_message(kind: str, fields: dict[str, str], end: bool) -> Any:
    pairs = [ext_proc.HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()]
    headers = ext_proc.MESSAGES["HttpHeaders"](headers=ext_proc.MESSAGES["HeaderMap"](headers=pairs), end_of_stream=end)
    return ext_proc.ProcessingRequest(**{kind: headers})


@dataclass
class Answer:
    """What the picker said about a request."""

    endpoints: list[str] = field(default_factory=list)
    metadata: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    status: int = 0
    """Of an immediate response; 0: the request has endpoints."""
    body: bytes = b""
    response_headers: dict[str, str] = field(default_factory=dict)
    sent_back: bytes = b""
    """The request's body, where it goes back to Envoy."""

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class FakeEnvoy:
    """One ext_proc stream."""

    def __init__(self, call: Any, mode: str, response_mode: str) -> None:
        self.call = call
        self.mode = MODES[mode]
        self.response_mode = MODES[response_mode]
        self.more_time_s: list[float] = []
        self._reading: asyncio.Task[Any] | None = None
        """Of the first answer: the picker may reject a request before it has its body."""
        self._sends_whole_body = False
        """Whether Envoy sends the whole body in one message, which the decision then answers."""

    async def read(self) -> Any:
        while True:
            reading, self._reading = self._reading, None
            message = await asyncio.wait_for(reading or self.call.read(), 20.0)
            if message is grpc.aio.EOF or not message.HasField("override_message_timeout"):
                return message
            self.more_time_s.append(message.override_message_timeout.ToTimedelta().total_seconds())

    async def send_request(
        self, body: bytes | None = None, path: str = "/v1/chat/completions", method: str = "POST",
        subset: Sequence[str] | str | None = None, trailers: bool = False, pieces: int = 1, protocol: bool = True,
        between: Callable[[], None] | None = None, **headers: str,
    ) -> None:  # fmt: skip
        """Send a request; do not wait for its decision. `between` is called before the body of mode "buffered"."""
        fields = {":method": method, ":path": path, ":authority": "gateway", ":scheme": "http"}
        if body is not None:
            fields |= {"content-type": "application/json", "content-length": str(len(body))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        message = headers_message("request_headers", fields, body is None)
        if protocol:
            message.protocol_config.request_body_mode = self.mode
            message.protocol_config.response_body_mode = self.response_mode
            message.protocol_config.send_body_without_waiting_for_header_response = self.mode == STREAMED
        if subset is not None:
            hint = message.metadata_context.filter_metadata[ext_proc.SUBSET_NAMESPACE]
            hint[ext_proc.SUBSET] = subset if isinstance(subset, str) else list(subset)
        await self.call.write(message)
        if body is None:
            return
        self._sends_whole_body = self.mode == BUFFERED
        if self._sends_whole_body:
            answer = await self.read()
            if answer is not grpc.aio.EOF and answer.HasField("immediate_response"):
                self._early = answer
                return
            assert answer.HasField("request_headers")
            if between is not None:
                between()
        else:
            self._reading = asyncio.ensure_future(self.call.read())
        size = -(-len(body) // pieces) or 1
        parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        for number, part in enumerate(parts, 1):
            ends = number == len(parts) and not trailers
            http = ext_proc.MESSAGES["HttpBody"](body=part, end_of_stream=ends)
            try:
                await self.call.write(ext_proc.ProcessingRequest(request_body=http))
            except grpc.aio.AioRpcError:  # the picker has answered before
                return
        if trailers and self.mode != BUFFERED:
            await self.call.write(ext_proc.ProcessingRequest(request_trailers=ext_proc.MESSAGES["HttpTrailers"]()))

    _early: Any = None

    async def decision(self) -> Answer:
        """Read the picker's decision, and the body that it sends back."""
        first = self._early or await self.read()
        assert first is not grpc.aio.EOF, "the stream ended without an answer"
        answer = Answer()
        if first.HasField("immediate_response"):
            immediate = first.immediate_response
            answer.status, answer.body = immediate.status.code, immediate.body
            answer.response_headers = {
                one.header.key: one.header.raw_value.decode() for one in immediate.headers.set_headers
            }
            return answer
        answered = "request_body" if self._sends_whole_body else "request_headers"
        assert first.HasField(answered)
        common = getattr(first, answered).response
        mutation = common.header_mutation
        answer.headers = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
        answer.removed = list(mutation.remove_headers)
        answer.endpoints = answer.headers[ext_proc.DESTINATION].split(",")
        answer.metadata = first.dynamic_metadata["envoy.lb"][ext_proc.DESTINATION]
        assert common.clear_route_cache
        return answer

    async def body_back(self) -> bytes:
        """Read the body that the picker sends back (FULL_DUPLEX_STREAMED)."""
        body: bytes = b""
        while True:
            message = await self.read()
            if message.HasField("request_trailers"):
                return body
            chunk = message.request_body.response.body_mutation.streamed_response
            assert len(chunk.body) <= ext_proc.MAX_CHUNK_BYTES
            body += bytes(chunk.body)
            if chunk.end_of_stream:
                return body

    async def respond(
        self, *pieces: bytes, status: int = 200, served: str = "", content_type: str = "text/event-stream",
        end: bool = True, from_node: bool = True, **headers: str,
    ) -> list[bytes]:  # fmt: skip
        """Show the picker a response. Return what goes to the client."""
        fields = {":status": str(status), "content-type": content_type}
        if from_node:
            fields["x-envoy-upstream-service-time"] = "1"
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        message = headers_message("response_headers", fields, end=False)
        if served:
            message.metadata_context.filter_metadata["envoy.lb"][ext_proc.SERVED] = served
        await self.call.write(message)
        assert (await self.read()).HasField("response_headers")
        return await self.show(*pieces, end=end)

    async def show(self, *pieces: bytes, end: bool = True) -> list[bytes]:
        """Show the picker more of the response. Return what goes to the client."""
        passed: list[bytes] = []
        if self.response_mode == NONE:
            return passed
        shown = [(piece, False) for piece in pieces] + ([(b"", True)] if end else [])
        for piece, ends in shown:
            await self.call.write(
                ext_proc.ProcessingRequest(response_body=ext_proc.MESSAGES["HttpBody"](body=piece, end_of_stream=ends))
            )
            answer = await self.read()
            assert answer.HasField("response_body")
            if self.response_mode == DUPLEX:
                chunk = answer.response_body.response.body_mutation.streamed_response
                assert (chunk.body, chunk.end_of_stream) == (piece, ends)
            passed.append(piece)
        return passed

    async def finish(self) -> None:
        """End the stream, as Envoy does when the response has ended or the client has left."""
        await self.call.done_writing()
        assert await self.read() is grpc.aio.EOF


class RunningPicker:
    def __init__(self, service: Service) -> None:
        self.service = service
        assert isinstance(service.picker, PickerServer)
        self.server: PickerServer = service.picker
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{service.port}", options=[("grpc.max_receive_message_length", -1)]
        )
        self.loop_errors: list[str] = []

    def stream(self, mode: str = "buffered", responses: str = "streamed", channel: Any = None) -> FakeEnvoy:
        process = (channel or self.channel).stream_stream(
            f"/{ext_proc.SERVICE}/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )
        return FakeEnvoy(process(), mode, responses)

    async def ask(self, body: bytes | None = None, mode: str = "buffered", **more: Any) -> Answer:
        """Ask for a node, and end the request."""
        envoy = self.stream(mode)
        await envoy.send_request(chat_body() if body is None else body, **more)
        answer = await envoy.decision()
        envoy.call.cancel()
        return answer

    def inflight(self) -> list[int]:
        return [node.inflight for node in self.service.fleet]

    async def until_idle(self) -> None:
        service, server = self.service, self.server
        await until(
            lambda: (
                not any(self.inflight()) and not service.admission.queue.waiting and not server.connections
                and not server.buffered_bytes and not any(group.inflight for group in service.fleet.groups)
                and not service.brain.open
            ),
            "all counters return to 0",
        )  # fmt: skip


@asynccontextmanager
async def picker(
    *nodes: ScriptedEngine | BlackHole | dict[str, Any], wait: bool = True, **tables: Any
) -> AsyncIterator[RunningPicker]:
    config = from_table(
        quick_table(nodes, **{"picker": {"port": 0, "message_timeout_s": 5.0}} | tables), experiment=True
    )
    service = Service(lambda: config, create_picker=picker_factory())
    loop, errors = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _loop, context: errors.append(f"{context!r}"))
    await service.start()
    running = RunningPicker(service)
    try:
        if wait:
            await until(lambda: count_up(service) == len(nodes), "all nodes are up")
            await until(lambda: not service.proxy.own_endpoints.starting, "the picker has started")
        yield running
        await running.until_idle()
    finally:
        await running.channel.close()
        await service.stop()
        loop.set_exception_handler(None)
    assert not errors, errors
    exchanges = [one for one in _objects() if type(one) is EnvoyExchange and one._proxy is service.proxy]
    assert not exchanges, "an exchange is left over"


def _objects() -> list[object]:
    return gc.get_objects()
