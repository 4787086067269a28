"""KV transfer between simulated engines, with the messages of vLLM's NixlConnector.

A prefill request (`do_remote_decode`) leaves its KV cache pinned for LEASE_S. The answer names the engine and the
request. A decode request (`do_remote_prefill`) fetches it: the decode engine asks the other one for it, and waits as
long as the tokens that it lacks take over its link, one transfer after the other. A cache that is gone, or an engine
that does not answer, fails the request as vLLM does (`kv_load_failure_policy` = `fail`).
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

import msgspec

from warmroute.fake_engine.server.engine_clock import EngineClock

LEASE_S: Final = 30.0
FETCH_PATH: Final = "/kv_transfer"
LATENCY_S: Final = 0.002


class TransferFailed(Exception):
    """The KV cache could not be fetched."""


class KvTransfers:
    """Of one engine."""

    def __init__(self, host: str, bytes_per_token: int, gigabytes_per_s: float, clock: EngineClock) -> None:
        self._host = host
        self.port = 0
        self._engine_id = os.urandom(8).hex()
        self._seconds_per_token = bytes_per_token / (gigabytes_per_s * 1e9)
        self._clock = clock
        self._pinned: dict[str, asyncio.TimerHandle] = {}
        self._link_free_s = 0.0
        self.transfers = self.failures = 0

    def metrics(self, model: str) -> bytes:
        """Return two of the metrics that vLLM has with NixlConnector."""
        labels = f'{{engine="0",model_name="{model}"}}'
        return (
            f"# TYPE vllm:nixl_xfer_time_seconds summary\nvllm:nixl_xfer_time_seconds_count{labels} {self.transfers}\n"
            "# TYPE vllm:nixl_num_failed_transfers counter\n"
            f"vllm:nixl_num_failed_transfers_total{labels} {self.failures}\n"
        ).encode()

    # The prefill side.

    def pin(self, request_id: str, tokens: int) -> dict[str, Any]:
        """Keep the KV cache of a request. Return the parameters for the decode request."""
        loop = asyncio.get_running_loop()
        self._pinned[request_id] = loop.call_later(LEASE_S, self._pinned.pop, request_id, None)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]],
            "remote_engine_id": self._engine_id, "remote_request_id": request_id, "remote_host": self._host,
            "remote_port": self.port, "tp_size": 1, "remote_num_tokens": tokens, "transfer_mode": "pull",
        }  # fmt: skip

    def release(self, request_id: str) -> bool:
        """Another engine fetches the KV cache of a request. Return whether it was there."""
        timer = self._pinned.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    # The decode side.

    async def fetch(self, params: dict[str, Any], missing_tokens: int) -> None:
        """Fetch a KV cache. Raises TransferFailed."""
        try:
            await self._ask(params)
        except (OSError, ValueError, EOFError, KeyError, TypeError):
            self.failures += 1
            raise TransferFailed from None
        now_s = asyncio.get_running_loop().time()
        took_s = self._clock.real_seconds(1000.0 * missing_tokens * self._seconds_per_token)
        self._link_free_s = max(self._link_free_s, now_s) + took_s
        await asyncio.sleep(self._link_free_s - now_s + LATENCY_S)
        self.transfers += 1

    async def _ask(self, params: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
        try:
            body = msgspec.json.encode({"request_id": params["remote_request_id"]})
            head = f"POST {FETCH_PATH} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError("the KV cache is gone")
        finally:
            writer.transport.abort()
