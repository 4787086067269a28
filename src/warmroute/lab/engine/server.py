"""vLLM's HTTP endpoints around the simulated engine, and its failures on command."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from warmroute.config import Limits
from warmroute.edge.async_handler import AsyncHandler, Request, Responder
from warmroute.edge.client_connection import Listener
from warmroute.edge.sockets import Server, listen_tcp
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.event_log import EventLog
from warmroute.lab.engine import api_bodies, generation, metrics_page
from warmroute.lab.engine.api_bodies import AnthropicError, ApiError, ResponsesRequest, decode_body
from warmroute.lab.engine.blocks import SharedStore
from warmroute.lab.engine.generation import PlannedResponse, ResponsePlanner, respond
from warmroute.lab.engine.rank import (
    BUFFER_BATCHES,
    FETCH_PATH,
    HIGH_WATER_MARK,
    EngineClock,
    EventPublisher,
    KvTransfers,
    Rank,
)
from warmroute.lab.engine.timing import Timing
from warmroute.lab.engine.tokenizers import Tokenizer
from warmroute.lab.engine.values import EngineConfig

# Faults that a running simulated engine has on command. POST /_sim/fail takes one of:
#
#     {"mode": "die"}                          the process exits at once, as with kill -9
#     {"mode": "hang"}                         the engine answers nothing and running responses stop, as in a deadlock
#     {"mode": "hang", "health": true}         the same, but /health and /metrics answer, as when only the GPU hangs
#     {"mode": "error500", "share": 0.5}       this fraction of new generations fails with 500 (default: 1)
#     {"mode": "busy503", "share": 0.5}        this fraction of new generations fails with 503 (default: 1)
#     {"mode": "slow", "factor": 4}            the engine runs at a quarter of its speed
#     {"mode": "drop_events", "share": 0.1}    this fraction of event batches is lost; replay still has them
#     {"mode": "restart"}                      restart in place: empty cache, event sequence from 0, new process start
#                                              time, counters at zero, running responses broken off
#     {"mode": "early_role"}                   streams send a chunk with only a role at once, long before a token
#     {"mode": "early_comment"}                streams send a comment (`: ping`) at once
#     {"mode": "none"}                         no fault; responses that hung continue
#
# A new mode replaces the previous one. `restart` ends by itself. GET /_sim/fail returns the current mode. /_sim answers
# in every mode.

Mode = Literal[
    "none", "die", "hang", "error500", "busy503", "slow", "drop_events", "restart", "early_role", "early_comment"
]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    mode: Mode
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    factor: Annotated[float, Meta(gt=0)] = 1.0
    health: bool = False


NO_FAULT = Fault("none")


class Faults:
    """The current fault of one engine."""

    def __init__(self, seed: int) -> None:
        self.fault = NO_FAULT
        self._random = Random(seed)
        self._not_hanging = asyncio.Event()
        self._not_hanging.set()

    def set(self, fault: Fault) -> None:
        if fault.mode == "die":
            os._exit(137)
        self.fault = NO_FAULT if fault.mode == "restart" else fault
        if self.fault.mode == "hang":
            self._not_hanging.clear()
        else:
            self._not_hanging.set()

    def drops_event(self) -> bool:
        """Return whether the next event batch is lost."""
        return self.fault.mode == "drop_events" and self._random.random() < self.fault.share

    def next_error(self) -> Literal["error500", "busy503"] | None:
        """Return how the next generation fails, or None."""
        mode = self.fault.mode
        if (mode == "error500" or mode == "busy503") and self._random.random() < self.fault.share:
            return mode
        return None

    @property
    def early_event(self) -> Literal["early_role", "early_comment"] | None:
        """Return what a stream sends before its first token, or None."""
        mode = self.fault.mode
        return mode if mode == "early_role" or mode == "early_comment" else None

    async def wait_while_hanging(self, path: str) -> None:
        while not self._not_hanging.is_set() and not (self.fault.health and path in ("/health", "/metrics")):
            await self._not_hanging.wait()

    @property
    def slowdown(self) -> float:
        return self.fault.factor if self.fault.mode == "slow" else 1.0


# The simulated engine's HTTP server: its endpoints, its start and its stop.

log = EventLog("warmroute.fake_engine")

VERSION = "0.32.0"
IDLE_TIMEOUT_S = 5.0
"""vLLM closes a connection that was idle for this time."""
STOP_EVENT = "engine_stopping"
"""The log event of a stop. Its field `requests_in_flight` is 0 if the engine was drained."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one simulated engine process."""

    engine: EngineConfig
    timing: Timing
    profile: str
    tokenizer: Tokenizer
    host: str = "127.0.0.1"
    port: int = 8000
    events_port: int | None = None
    """None: no events. 0: a free port, as for the other ports."""
    replay_port: int | None = None
    topic: str | None = None
    model: str = "sim"
    loras: tuple[str, ...] = ()
    ranks: int = 1
    speed: float = 1.0
    seed: int = 0
    mean_output_tokens: int = 128
    """Mean length of outputs without max_tokens."""
    kv_connector: bool = False
    """Whether the engine transfers KV cache to and from others."""
    kv_bytes_per_token: int = 131_072
    kv_gigabytes_per_s: float = 10.0
    store: SharedStore | None = None
    """A KV store that engines of one process share."""


Endpoint = Callable[[Request, Responder], Awaitable[None] | None]


class EngineServer:
    """Needs a running event loop. Call `start`, then `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        # for its whole life
        self.config = config
        self.port = 0
        self.faults = Faults(config.seed)
        self.clock = EngineClock(config.speed)
        self.ranks: list[Rank] = []
        self.kv_transfers = (
            KvTransfers(config.host, config.kv_bytes_per_token, config.kv_gigabytes_per_s, self.clock)
            if config.kv_connector
            else None
        )
        self._planner = ResponsePlanner(
            config.tokenizer,
            config.model,
            config.loras,
            config.engine.capacity_tokens,
            config.seed,
            config.mean_output_tokens,
        )
        self._deadlines = TimerWheel(time.monotonic)
        limits = msgspec.structs.replace(Limits(), idle_timeout_s=IDLE_TIMEOUT_S)
        self._listener = Listener(AsyncHandler(self._handle), limits, self._deadlines)
        self._server: Server | None = None
        self._timer_task: asyncio.Task[None] | None = None
        self._next_rank = 0
        self._routes: dict[str, dict[str, Endpoint]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/v1/responses": {"POST": self._response},
            "/v1/messages": {"POST": self._message},
            "/v1/messages/count_tokens": {"POST": self._count_message_tokens},
            "/v1/embeddings": {"POST": self._embeddings},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._empty},
            "/ping": {"GET": self._empty, "POST": self._empty},
            "/metrics": {"GET": self._metrics},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/kv_event_sources": {"GET": self._event_sources},
            "/server_info": {"GET": self._server_info},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/sleep": {"POST": self._sleep},
            "/wake_up": {"POST": self._wake_up},
            "/is_sleeping": {"GET": self._is_sleeping},
            FETCH_PATH: {"POST": self._release_kv},
            "/_sim/fail": {"POST": self._set_fault, "GET": self._get_fault},
        }
        # from one restart in place to the next
        self._process = metrics_page.ProcessInfo(config.model, config.loras, config.engine, time.time(), {})

    # ---- start and stop

    async def start(self) -> None:
        """Raises ConfigError if a port is not available."""
        config = self.config
        self._server = await listen_tcp(self._listener, config.host, config.port)
        self.port = self._server.sockets[0].getsockname()[1]
        if self.kv_transfers is not None:
            self.kv_transfers.port = self.port
        self._timer_task = asyncio.get_running_loop().create_task(self._deadlines.run())
        topic = f"kv@{config.host}:{self.port}@{config.model}" if config.topic is None else config.topic
        for number in range(config.ranks):
            events = None
            if config.events_port is not None:
                events = EventPublisher(topic, number, self.faults.drops_event)
                replay_port = None if config.replay_port is None else _port_of_rank(config.replay_port, number)
                events.listen(config.host, _port_of_rank(config.events_port, number), replay_port)
            self.ranks.append(Rank(number, config.engine, config.timing, self.clock, events, config.store))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.abort_all()
        await asyncio.sleep(0)
        for rank in self.ranks:
            rank.stop()
            if rank.events is not None:
                rank.events.close()
        if self._timer_task is not None:
            self._timer_task.cancel()
        await asyncio.sleep(0)

    async def serve_until_signal(self) -> None:
        """Start, print the URL and ports as JSON, and serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled.set)
        try:
            await self.start()
            gc.collect()
            gc.freeze()
            print(msgspec.json.encode(self.describe()).decode(), flush=True)
            await signalled.wait()
            log.info(STOP_EVENT, requests_in_flight=self._requests_in_flight())
        finally:
            await self.stop()

    def describe(self) -> dict[str, Any]:
        config = self.config
        return {
            "url": f"http://{config.host}:{self.port}",
            "model": config.model,
            "profile": config.profile,
            "speed": config.speed,
            "kv_tokens": config.engine.num_blocks * config.engine.block_size,
            "block_size": config.engine.block_size,
            "kv_connector": config.kv_connector,
            "events": [rank.events.port for rank in self.ranks if rank.events is not None],
            "replay": [rank.events.replay_port for rank in self.ranks if rank.events is not None],
        }

    # ---- dispatch

    async def _handle(self, request: Request, responder: Responder) -> None:
        methods = self._routes.get(request.path)
        if not request.path.startswith("/_sim"):
            await self.faults.wait_while_hanging(request.path)
        status = 200
        try:
            if methods is None:
                raise _PlainError(404, "Not Found")
            endpoint = methods.get(request.method)
            if endpoint is None:
                raise _PlainError(405, "Method Not Allowed")
            pending = endpoint(request, responder)
            if pending is not None:
                await pending
        except ApiError as error:
            status = error.status
            is_anthropic = request.path.startswith("/v1/messages")
            responder.reply(status, AnthropicError(error).body() if is_anthropic else error.body())
        except _PlainError as error:
            status = error.status
            responder.reply(status, msgspec.json.encode({"detail": str(error)}))
        finally:
            if methods is not None:
                key = (request.path, request.method, f"{status // 100}xx")
                counts = self._process.http_requests
                counts[key] = counts.get(key, 0) + 1

    # ---- generation

    def _chat(self, request: Request, responder: Responder) -> Awaitable[None]:
        self._raise_fault()
        body = decode_body(request.body, api_bodies.ChatRequest)
        return self._generate(self._planner.chat(body), request, responder)

    def _completion(self, request: Request, responder: Responder) -> Awaitable[None]:
        self._raise_fault()
        body = decode_body(request.body, api_bodies.CompletionRequest)
        return self._generate(self._planner.completion(body), request, responder)

    def _response(self, request: Request, responder: Responder) -> Awaitable[None]:
        self._raise_fault()
        body = decode_body(request.body, ResponsesRequest)
        return self._generate(self._planner.response(body), request, responder)

    def _message(self, request: Request, responder: Responder) -> Awaitable[None]:
        self._raise_fault()
        body = decode_body(request.body, api_bodies.MessagesRequest)
        return self._generate(self._planner.message(body), request, responder)

    def _count_message_tokens(self, request: Request, responder: Responder) -> None:
        body = decode_body(request.body, api_bodies.CountTokensRequest)
        _reply(responder, {"input_tokens": len(self._planner.message_tokens(body))})

    def _embeddings(self, request: Request, responder: Responder) -> Awaitable[None]:
        self._raise_fault()
        body = decode_body(request.body, generation.EmbeddingsRequest)
        planner, config = self._planner, self.config
        planner.check_model(body.model)
        inputs = generation.input_tokens(body, config.tokenizer, planner.max_model_len)
        lora_name = body.model if body.model in config.loras else None
        return generation.respond_with_embeddings(
            body, inputs, body.model or config.model, lora_name, self._rank_for(request), _request_id(request),
            responder, config.engine.block_size,
        )  # fmt: skip

    def _generate(self, planned: PlannedResponse, request: Request, responder: Responder) -> Awaitable[None]:
        return respond(
            planned, self._rank_for(request), _request_id(request), responder, self.config.engine.block_size,
            self.faults.early_event, self.kv_transfers,
        )  # fmt: skip

    def _raise_fault(self) -> None:
        match self.faults.next_error():
            case "error500":
                raise api_bodies.engine_failed()
            case "busy503":
                raise api_bodies.overloaded()

    def _rank_for(self, request: Request) -> Rank:
        """Return the rank that the request names, or the least loaded one, with ties in turn."""
        named = request.head.get(b"x-data-parallel-rank")
        if named:
            if not named.isdigit() or int(named) >= len(self.ranks):
                shown = named.decode("ascii", "replace")[:20]
                raise api_bodies.bad_request(f"data_parallel_rank {shown} is out of range [0, {len(self.ranks)}).")
            return self.ranks[int(named)]
        self._next_rank += 1
        count = len(self.ranks)
        return min((self.ranks[(self._next_rank + step) % count] for step in range(count)), key=lambda rank: rank.load)

    def _release_kv(self, request: Request, responder: Responder) -> None:
        """Another engine fetches the KV cache of a request."""
        body = decode_body(request.body, api_bodies.FetchRequest)
        if self.kv_transfers is None or not self.kv_transfers.release(body.request_id):
            raise _PlainError(404, "Not Found")
        _reply(responder, {})

    # ---- information

    def _empty(self, _request: Request, responder: Responder) -> None:
        responder.reply(200, b"", "text/plain")

    def _models(self, _request: Request, responder: Responder) -> None:
        config = self.config
        cards = [self._model_card(config.model, config.model, None)]
        cards += [self._model_card(name, f"adapters/{name}", config.model) for name in config.loras]
        _reply(responder, {"object": "list", "data": cards})

    def _model_card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        created = int(time.time())
        permission = {
            "id": f"modelperm-{os.urandom(8).hex()}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self._planner.max_model_len if parent is None else None,
            "permission": [permission],
        }

    def _tokenize(self, request: Request, responder: Responder) -> None:
        body = decode_body(request.body, api_bodies.TokenizeRequest)
        if body.messages:
            tokens = self._planner.chat_tokens(body.messages, body.tools, body.add_generation_prompt)
        elif body.prompt is not None:
            tokens = self.config.tokenizer.encode(body.prompt, body.add_special_tokens)
        else:
            raise api_bodies.bad_body("Either `prompt` or `messages` is needed.")
        limit = self._planner.max_model_len
        _reply(responder, {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    def _detokenize(self, request: Request, responder: Responder) -> None:
        body = decode_body(request.body, api_bodies.DetokenizeRequest)
        _reply(responder, {"prompt": self.config.tokenizer.decode(body.tokens)})

    def _metrics(self, _request: Request, responder: Responder) -> None:
        page = metrics_page.render(self._process, self.ranks)
        if self.kv_transfers is not None:
            page += self.kv_transfers.metrics(self.config.model)
        responder.reply(200, page, metrics_page.CONTENT_TYPE)

    def _version(self, _request: Request, responder: Responder) -> None:
        _reply(responder, {"version": VERSION, "simulated_by": "warmroute"})

    def _load(self, _request: Request, responder: Responder) -> None:
        _reply(responder, {"server_load": self._requests_in_flight()})

    def _requests_in_flight(self) -> int:
        return sum(rank.core.num_running + rank.core.num_waiting for rank in self.ranks)

    def _event_sources(self, _request: Request, responder: Responder) -> None:
        """vLLM returns the address it binds event sockets to, which is a wildcard, unlike that of the HTTP server."""
        sources: dict[str, Any] = {}
        config = self.config
        for rank in self.ranks:
            if rank.events is None:
                continue
            replays = config.replay_port is not None
            sources[str(rank.number)] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{rank.events.port}",
                "replay_endpoint": f"tcp://*:{rank.events.replay_port}" if replays else None,
                "buffer_steps": BUFFER_BATCHES,
                "hwm": HIGH_WATER_MARK,
                "max_queue_size": HIGH_WATER_MARK,
                "topic": rank.events.topic,
            }
        _reply(responder, sources)

    def _server_info(self, _request: Request, responder: Responder) -> None:
        _reply(responder, {"simulated_by": "warmroute", "vllm_version": VERSION, **self.describe()})

    # ---- commands

    def _reset_prefix_cache(self, _request: Request, responder: Responder) -> None:
        done = [rank.reset_prefix_cache() for rank in self.ranks]
        _reply(responder, {"success": all(done)})

    def _sleep(self, _request: Request, responder: Responder) -> None:
        for rank in self.ranks:
            rank.sleep()
        responder.reply(200, b"", "text/plain")

    def _wake_up(self, _request: Request, responder: Responder) -> None:
        for rank in self.ranks:
            rank.wake_up()
        responder.reply(200, b"", "text/plain")

    def _is_sleeping(self, _request: Request, responder: Responder) -> None:
        _reply(responder, {"is_sleeping": all(rank.core.is_asleep for rank in self.ranks)})

    def _set_fault(self, request: Request, responder: Responder) -> None:
        fault = decode_body(request.body, Fault)
        log.warning("fault_injected", **msgspec.to_builtins(fault))
        self.faults.set(fault)
        self.clock.set_speed(0.0 if fault.mode == "hang" else self.config.speed / self.faults.slowdown)
        if fault.mode == "restart":
            self._process = msgspec.structs.replace(self._process, started=time.time(), http_requests={})
        for rank in self.ranks:
            if fault.mode == "restart":
                rank.restart()
            else:
                rank.run_until_now()
        _reply(responder, self.faults.fault)

    def _get_fault(self, _request: Request, responder: Responder) -> None:
        _reply(responder, self.faults.fault)


class _PlainError(Exception):
    """An error of FastAPI itself, with its response format."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _request_id(request: Request) -> str:
    return request.head.request_id.decode("ascii", "replace") or os.urandom(8).hex()


def _reply(responder: Responder, value: Any) -> None:
    responder.reply(200, msgspec.json.encode(value))


def _port_of_rank(port: int, rank: int) -> int:
    """Rank n has the n-th port after the first one. 0 stays 0: every rank takes a free port."""
    return port + rank if port else port
