"""The KV transfer protocols by engine."""

from __future__ import annotations

from typing import Final

from warmroute.engines.sglang_kv_transfer import SglangKvTransfer
from warmroute.engines.trtllm_kv_transfer import TrtllmKvTransfer
from warmroute.engines.vllm_kv_transfer import VllmKvTransfer
from warmroute.fleet.kv_transfer_protocol import KvTransfer

KV_TRANSFERS: Final[dict[str, KvTransfer]] = {
    "vllm": VllmKvTransfer(),
    "sglang": SglangKvTransfer(),
    "trtllm": TrtllmKvTransfer(),
}
