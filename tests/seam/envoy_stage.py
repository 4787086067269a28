"""Core and Envoy's edge in one process: each call is an ext_proc stream over gRPC, and the test plays Envoy."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from support.picker import Answer, FakeEnvoy

from seam.edge_stage import EdgeStage, request_body, request_headers, usage_json
from seam.player import Play
from seam.script import EVERY_REQUEST, IS_ENVOY, NAMES_NODES, SETS_THE_CLOCK, TAKES_SUBSETS, Arrive, Script, Tell
from warmroute.config import Limits, Picker
from warmroute.core.messages import DUE
from warmroute.core.node import Node
from warmroute.edge.envoy import ext_proc
from warmroute.edge.envoy.server import PickerServer

ROLE: Final = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
TOKEN: Final = b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
FIRST_PORT: Final = 20_000
SHORT_S: Final = 0.3
"""How long Envoy waits where a script has it lose patience; else it waits as long as it takes."""


class EnvoyStage(EdgeStage):
    can = EVERY_REQUEST | {IS_ENVOY, NAMES_NODES, SETS_THE_CLOCK, TAKES_SUBSETS}
    is_envoy = True

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, FakeEnvoy] = {}
        self.decisions: dict[str, asyncio.Task[Answer]] = {}
        self._begun: set[str] = set()
        self._ports = FIRST_PORT

    async def open(self, script: Script) -> list[Node]:
        nodes = await super().open(script)
        loses_patience = any(
            isinstance(line.event, Tell) and line.event.message == "AnswerNow" for line in script.lines
        )
        picker = Picker(port=0, message_timeout_s=SHORT_S if loses_patience else 600.0)
        self.server = PickerServer(self.proxy, Limits(), lambda: picker, dict)
        await self.server.listen()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        return nodes

    def add(self, name: str, spec: Any) -> Node:
        self._ports += 1
        host = "127.0.0.1" if spec.has_address else "nowhere.invalid"
        self.urls[name] = f"http://{host}:{self._ports}"
        return super().add(name, spec)

    async def close(self) -> None:
        for decision in self.decisions.values():
            decision.cancel()
        for stream in self.streams.values():
            stream.call.cancel()
        await asyncio.gather(*self.decisions.values(), return_exceptions=True)
        await self.channel.close()
        await self.server.close()
        self.pools.close()
        self.sockets.close()

    # Requests.

    async def arrive(self, play: Play, event: Arrive, on: Node | None) -> None:
        call, fields, since = play.id_of(event.call), event.fields, len(self.told)
        number = next(self._new_prompts) if event.prompt is None else event.prompt
        others = [node for node in self.fleet if on is not None and node is not on and not node.draining]
        for other in others:
            self.fleet.drain(other.name)
        self.prompts.sizes[event.call] = (event.tokens, number)
        responses = "none" if self._is_unseen(play, event.call) else "streamed"
        process = self.channel.stream_stream(
            f"/{ext_proc.SERVICE}/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )
        stream = self.streams[event.call] = FakeEnvoy(process(), "buffered", responses)
        subset = None
        if "subset" in fields:
            subset = [f"127.0.0.1:{play.node(name).port}" for name in fields["subset"]]
        headers: dict[str, Any] = {**request_headers(call, fields)}
        await stream.send_request(request_body(event.call, fields), subset=subset, **headers)
        self.decisions[event.call] = asyncio.create_task(stream.decision())
        await self.until_told(("Arrive",), call, None, since)
        for other in others:
            self.fleet.drain(other.name, False)
        if others:
            self.tell_core(DUE)

    @staticmethod
    def _is_unseen(play: Play, call: str) -> bool:
        """Whether Envoy does not show the call's response."""
        return any(
            isinstance(line.event, Tell) and line.event.call == call and line.event.fields.get("status") == 0
            for line in play.script.lines
        )

    # Responses.

    async def tell(self, play: Play, event: Tell) -> None:
        call, since = play.id_of(event.call), len(self.told)
        stream = self.streams[event.call]
        if event.message == "Cancel":
            if event.fields["why"] == "LEFT":
                stream.call.cancel()
            else:
                self.proxy.exchanges[call].cut_off()  # type: ignore[attr-defined]
            await self.until_told(("Cancel",), call, None, since)
        elif event.message == "AnswerNow":
            await self.until_told(("AnswerNow",), call, None, since)
        else:
            await self.decisions[event.call]
            await getattr(self, f"on_{event.message.lower()}")(play, event, stream)
            expected = ("Ended",) if event.message == "Ended" else ("Started", "FirstToken", "Ended")
            if event.fields["status"] or event.message == "Ended":
                await self.until_told(expected, call, None, since)

    async def on_started(self, play: Play, event: Tell, stream: FakeEnvoy) -> None:
        fields = event.fields
        if not fields["status"]:
            return
        self._begun.add(event.call)
        served = f"127.0.0.1:{play.node(fields['served']).port}" if fields.get("served") else ""
        await stream.respond(
            status=fields["status"], served=served, end=False, from_node=not fields.get("by_envoy", False),
            content_type="text/event-stream" if fields["status"] < 400 else "application/json",
        )  # fmt: skip

    async def on_firsttoken(self, play: Play, event: Tell, stream: FakeEnvoy) -> None:
        if event.call not in self._begun:
            await self.on_started(play, event, stream)
        await stream.show(ROLE, TOKEN, end=False)

    async def on_ended(self, play: Play, event: Tell, stream: FakeEnvoy) -> None:
        status, usage = event.fields["status"], usage_json(event.fields["usage"])
        if not status:
            await stream.finish()
            return
        if event.call not in self._begun:
            await self.on_started(play, event, stream)
        if status >= 400:
            await stream.show(b"{}")
            return
        await stream.show(TOKEN, end=False)
        if usage:
            await stream.show(b'data: {"choices":[],"usage":%b}\n\n' % usage, end=False)
        await stream.show(DONE, end=not event.how)
        if event.how:  # the client leaves after the last event
            stream.call.cancel()

    # The end.

    async def check_answers(self, play: Play) -> None:
        """Envoy was told the node, or the error, of each call that has ended."""
        for name, end in play.script.ends.items():
            if end.left is not None or name not in self.decisions:
                continue
            answer = await self.decisions[name]
            if end.code:
                assert (answer.status, answer.error["code"]) == (end.status, end.code), f"{name} got {answer}"
            else:
                assert not answer.status, f"{name} got {answer}"
                assert answer.endpoints
        assert not self.proxy.exchanges, "the edge has calls left"
