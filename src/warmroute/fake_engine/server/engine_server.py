"""The simulated engine's server: what it answers on which path, and its life from start to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from warmroute.config import Limits
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.edge.listening_sockets import listen_tcp
from warmroute.edge.async_handler import AsyncHandler, Request, Responder
from warmroute.edge.listener import Listener
from warmroute.fake_engine.core import EngineConfig, Timing
from warmroute.fake_engine.server import metrics_page
from warmroute.fake_engine.server import generation as generate
from warmroute.fake_engine.server import vllm_errors as errors
from warmroute.fake_engine.server import request_bodies as bodies
from warmroute.fake_engine.server.engine_clock import EngineClock
from warmroute.fake_engine.server.vllm_errors import ApiError
from warmroute.fake_engine.server.kv_event_publisher import BUFFER_BATCHES, HIGH_WATER_MARK, EventPublisher
from warmroute.fake_engine.server.faults import Fault, Faults
from warmroute.fake_engine.server.rank import Rank
from warmroute.fake_engine.server.fake_tokenizer import Tokenizer

log = logging.getLogger("warmroute.sim")

VERSION = "0.32.0"
IDLE_TIMEOUT_S = 5.0
"""After which vLLM closes an idle connection."""
LAST_WORDS = "told to end with %d requests under way"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated engine process."""

    engine: EngineConfig
    timing: Timing
    profile: str
    tokenizer: Tokenizer
    host: str = "127.0.0.1"
    port: int = 8000
    events_port: int | None = None
    """None for no events; 0 takes a free port, as for the others."""
    replay_port: int | None = None
    topic: str | None = None
    model: str = "sim"
    loras: tuple[str, ...] = ()
    ranks: int = 1
    speed: float = 1.0
    seed: int = 0
    answer_tokens: int = 128
    """Mean length of answers that end of themselves."""


Handle = Callable[[Request, Responder], Awaitable[None] | None]


class EngineServer:
    """Build it within a running loop, `start` it, `stop` it."""

    def __init__(self, config: ServerConfig) -> None:
        # for its whole life
        self.config = config
        self.port = 0
        self.faults = Faults(config.seed)
        self.clock = EngineClock(config.speed)
        self.ranks: list[Rank] = []
        self._planner = generate.Planner(
            config.tokenizer,
            config.model,
            config.loras,
            config.engine.capacity_tokens,
            config.seed,
            config.answer_tokens,
        )
        self._deadlines = TimerWheel(time.monotonic)
        limits = msgspec.structs.replace(Limits(), idle_timeout_s=IDLE_TIMEOUT_S)
        self._listener = Listener(AsyncHandler(self._answer), limits, self._deadlines)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._turn = 0
        self._routes: dict[str, dict[str, Handle]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
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
            "/_sim/fail": {"POST": self._fail, "GET": self._tell_fault},
        }
        # from one restart in place to the next
        self._identity = metrics_page.Identity(config.model, config.loras, config.engine, time.time(), {})

    # Its life.

    async def start(self) -> None:
        """Raises ConfigError where a port can't be had."""
        config = self.config
        self._server = await listen_tcp(self._listener, config.host, config.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweeper = asyncio.get_running_loop().create_task(self._deadlines.run())
        topic = f"kv@{config.host}:{self.port}@{config.model}" if config.topic is None else config.topic
        for number in range(config.ranks):
            events = None
            if config.events_port is not None:
                events = EventPublisher(topic, number, self.faults.loses_event)
                replay_port = None if config.replay_port is None else _offset(config.replay_port, number)
                events.listen(config.host, _offset(config.events_port, number), replay_port)
            self.ranks.append(Rank(number, config.engine, config.timing, self.clock, events))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.abort_all()
        await asyncio.sleep(0)
        for rank in self.ranks:
            rank.stop()
            if rank.events is not None:
                rank.events.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.sleep(0)

    async def run_until_told(self) -> None:
        """Starts, says so on standard output, serves until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)
        try:
            await self.start()
            gc.collect()
            gc.freeze()
            print(msgspec.json.encode(self.describe()).decode(), flush=True)
            await told.wait()
            log.info(LAST_WORDS, self._under_way())
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
            "events": [rank.events.port for rank in self.ranks if rank.events is not None],
            "replay": [rank.events.replay_port for rank in self.ranks if rank.events is not None],
        }

    # Every request.

    async def _answer(self, request: Request, responder: Responder) -> None:
        methods = self._routes.get(request.path)
        if not request.path.startswith("/_sim"):
            await self.faults.pass_by(request.path)
        status = 200
        try:
            if methods is None:
                raise _PlainError(404, "Not Found")
            handle = methods.get(request.method)
            if handle is None:
                raise _PlainError(405, "Method Not Allowed")
            waiting = handle(request, responder)
            if waiting is not None:
                await waiting
        except ApiError as error:
            status = error.status
            responder.reply(status, error.body())
        except _PlainError as error:
            status = error.status
            responder.reply(status, msgspec.json.encode({"detail": str(error)}))
        finally:
            if methods is not None:
                key = (request.path, request.method, f"{status // 100}xx")
                counts = self._identity.http_requests
                counts[key] = counts.get(key, 0) + 1

    # Generation.

    def _chat(self, request: Request, responder: Responder) -> Awaitable[None]:
        self._refuse_by_fault()
        return self._generate(self._planner.chat(bodies.read(request.body, bodies.Chat)), request, responder)

    def _completion(self, request: Request, responder: Responder) -> Awaitable[None]:
        self._refuse_by_fault()
        body = bodies.read(request.body, bodies.Completion)
        return self._generate(self._planner.completion(body), request, responder)

    def _generate(self, planned: generate.Planned, request: Request, responder: Responder) -> Awaitable[None]:
        rank = self._rank_for(request)
        request_id = request.head.request_id.decode("ascii", "replace") or os.urandom(8).hex()
        return generate.answer(planned, rank, request_id, responder, self.config.engine.block_size)

    def _refuse_by_fault(self) -> None:
        match self.faults.refuses():
            case "error500":
                raise errors.engine_failed()
            case "busy503":
                raise errors.overloaded()

    def _rank_for(self, request: Request) -> Rank:
        """The rank that the request names, or the least loaded one, equals by turns."""
        named = request.head.get(b"x-data-parallel-rank")
        if named:
            if not named.isdigit() or int(named) >= len(self.ranks):
                shown = named.decode("ascii", "replace")[:20]
                raise errors.bad_request(f"data_parallel_rank {shown} is out of range [0, {len(self.ranks)}).")
            return self.ranks[int(named)]
        self._turn += 1
        count = len(self.ranks)
        return min((self.ranks[(self._turn + step) % count] for step in range(count)), key=lambda rank: rank.load)

    # What it tells of itself.

    def _empty(self, _request: Request, responder: Responder) -> None:
        responder.reply(200, b"", "text/plain")

    def _models(self, _request: Request, responder: Responder) -> None:
        config = self.config
        cards = [self._card(config.model, config.model, None)]
        cards += [self._card(name, f"adapters/{name}", config.model) for name in config.loras]
        _reply(responder, {"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
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
        body = bodies.read(request.body, bodies.Tokenize)
        if body.messages:
            tokens = self._planner.chat_tokens(body.messages, body.tools, body.add_generation_prompt)
        elif body.prompt is not None:
            tokens = self.config.tokenizer.encode(body.prompt, body.add_special_tokens)
        else:
            raise errors.bad_body("Either `prompt` or `messages` is needed.")
        limit = self._planner.max_model_len
        _reply(responder, {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    def _detokenize(self, request: Request, responder: Responder) -> None:
        body = bodies.read(request.body, bodies.Detokenize)
        _reply(responder, {"prompt": self.config.tokenizer.decode(body.tokens)})

    def _metrics(self, _request: Request, responder: Responder) -> None:
        responder.reply(200, metrics_page.render(self._identity, self.ranks), metrics_page.CONTENT_TYPE)

    def _version(self, _request: Request, responder: Responder) -> None:
        _reply(responder, {"version": VERSION})

    def _load(self, _request: Request, responder: Responder) -> None:
        _reply(responder, {"server_load": self._under_way()})

    def _under_way(self) -> int:
        return sum(rank.core.num_running + rank.core.num_waiting for rank in self.ranks)

    def _event_sources(self, _request: Request, responder: Responder) -> None:
        """vLLM tells what it was told to bind to, which is every address, whatever the HTTP server listens on."""
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

    # What it is told to do.

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

    def _fail(self, request: Request, responder: Responder) -> None:
        fault = bodies.read(request.body, Fault)
        log.warning("fault: %s", msgspec.json.encode(fault).decode())
        self.faults.set(fault)
        self.clock.run_at(0.0 if fault.mode == "hang" else self.config.speed / self.faults.slowness)
        if fault.mode == "restart":
            self._identity = msgspec.structs.replace(self._identity, started=time.time(), http_requests={})
        for rank in self.ranks:
            if fault.mode == "restart":
                rank.restart()
            else:
                rank.live()
        _reply(responder, self.faults.fault)

    def _tell_fault(self, _request: Request, responder: Responder) -> None:
        _reply(responder, self.faults.fault)


class _PlainError(Exception):
    """FastAPI's own errors, in its own form."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _reply(responder: Responder, value: Any) -> None:
    responder.reply(200, msgspec.json.encode(value))


def _offset(port: int, rank: int) -> int:
    """Each rank has its own port, counted up from the first one's; 0 is any free one for all of them."""
    return port + rank if port else port
