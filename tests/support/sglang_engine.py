"""`python -m sglang.launch_server` without a GPU: the simulated engine behind SGLang's flags, metrics, /server_info and
KV events. The formats are those of SGLang 0.5.23's sources.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from warmroute.edge.async_handler import Request, Responder
from warmroute.lab.engine import metrics_page, server
from warmroute.lab.engine.blocks import BlockRemoved, BlockStored, KvEvent
from warmroute.lab.engine.rank import EventPublisher
from warmroute.lab.engine.server import EngineServer, ServerConfig
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.tokenizers import ModelTokenizer
from warmroute.lab.engine.values import EngineConfig

METRICS = {
    "vllm:num_requests_running": "sglang:num_running_reqs",
    "vllm:num_requests_waiting": "sglang:num_queue_reqs",
    "vllm:kv_cache_usage_perc": "sglang:token_usage",
    "vllm:prompt_tokens_total": "sglang:prompt_tokens_total",
    "vllm:prefix_cache_hits_total": "sglang:cached_tokens_total",
}


def signed(number: int) -> int:
    """SGLang's hashes are signed 64-bit integers."""
    return number - (1 << 64) if number >> 63 else number


def sglang_events(events: Iterable[KvEvent]) -> Iterable[list[object]]:
    """One BlockStored for each page; arrays that start with the event's name."""
    for event in events:
        if isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            for number, block in enumerate(event.block_hashes):
                tokens = event.token_ids[number * size : (number + 1) * size]
                above = None if parent is None else signed(parent)
                yield ["BlockStored", [signed(block)], above, tokens, size, None, "GPU"]
                parent = block
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                yield ["BlockRemoved", [signed(block)], "GPU"]
        else:
            yield ["AllBlocksCleared"]


class Publisher(EventPublisher):
    def publish(self, events: list[KvEvent]) -> None:
        payload = msgspec.msgpack.encode([0.0, list(sglang_events(events)), self._rank])
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._buffer.append((sequence, payload))
        self._events.send_multipart((self._topic, sequence, payload))


class SglangEngine(EngineServer):
    def __init__(self, config: ServerConfig, flags: argparse.Namespace) -> None:
        super().__init__(config)
        self._flags = flags
        del self._routes["/kv_event_sources"], self._routes["/version"]

    def _metrics(self, _request: Request, responder: Responder) -> None:
        if not self._flags.enable_metrics:
            responder.reply(404, b"")
            return
        page = metrics_page.render(self._process, self.ranks).decode()
        for ours, theirs in METRICS.items():
            page = re.sub(rf"\b{ours}\b", theirs, page)
        lines = [line for line in page.splitlines() if "vllm:" not in line]
        responder.reply(200, ("\n".join(lines) + "\n").encode(), metrics_page.CONTENT_TYPE)

    def _server_info(self, _request: Request, responder: Responder) -> None:
        flags, port = self._flags, self.config.events_port
        info = {
            "version": "0.5.23", "model_path": flags.model_path, "page_size": flags.page_size, "dp_size": 1,
            "disable_radix_cache": False, "kv_events_config": flags.kv_events_config,
            "max_total_num_tokens": self.config.engine.capacity_tokens,
            "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "dp_size": 1},
        }  # fmt: skip
        responder.reply(200, json.dumps(info).encode())

    def _model_card(self, name: str, root: str, parent: str | None) -> dict[str, object]:
        length = self._planner.max_model_len
        return {"id": name, "object": "model", "owned_by": "sglang", "root": root, "max_model_len": length}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--port", type=int)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--kv-events-config", default="{}")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--enable-cache-report", action="store_true")
    flags = parser.parse_args()
    events = json.loads(flags.kv_events_config)
    chosen = profile("h100-8b")
    config = ServerConfig(
        engine=EngineConfig(
            num_blocks=500, block_size=flags.page_size, max_num_batched_tokens=8192, max_num_seqs=64,
            max_model_len=8192, every_token=True,
        ),
        timing=chosen.timing, profile=chosen.name, tokenizer=ModelTokenizer(Path(os.environ["SIMULATED_TOKENIZER"])),
        port=flags.port, model=flags.model_path, topic="", speed=10.0,
        events_port=urlsplit(events["endpoint"].replace("*", "a")).port,
        replay_port=urlsplit(events["replay_endpoint"].replace("*", "a")).port,
    )  # fmt: skip
    setattr(server, "EventPublisher", Publisher)  # noqa: B010

    async def serve() -> None:
        await SglangEngine(config, flags).serve_until_signal()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
