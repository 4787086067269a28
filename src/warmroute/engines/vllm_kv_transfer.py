"""vLLM's KV transfer with NixlConnector, as vLLM 0.32 does it for chat completions, completions, Anthropic's messages
and responses.

    prefill request    the client's, with one output token, not streamed, and kv_transfer_params {do_remote_decode}
    its response       kv_transfer_params: engine, host, port, request and block ids of the KV cache
    decode request     the client's, with these kv_transfer_params; the decode engine reads the blocks that it lacks

The prefill engine keeps the blocks for 30 s (`kv_lease_duration`) or until the decode engine has read them. If it is
gone by then, the decode engine answers with status 500, or with an error event behind a first event with a role
(`kv_load_failure_policy` = `fail`, the default).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import msgspec

from warmroute.fleet.kv_transfer_protocol import MAX_PARAMETERS_BYTES
from warmroute.fleet.node import Node

_DO_REMOTE_DECODE: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class VllmKvTransfer:
    def prefill_fields(self, fields: Container[str], prefill_node: Node, room: int) -> Mapping[str, bytes]:
        return {"kv_transfer_params": _DO_REMOTE_DECODE, **one_token_fields(fields)}

    def decode_fields(
        self, fields: Container[str], prefill_node: Node, room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        return {} if transfer is None else {"kv_transfer_params": transfer}

    def read_transfer(self, response: bytes) -> bytes | None:
        try:
            transfer = bytes(msgspec.json.decode(response, type=_Response).kv_transfer_params)
            if len(transfer) > MAX_PARAMETERS_BYTES:
                return None
            params = msgspec.json.decode(transfer)  # the decode node gets these bytes: all of them have to be valid
        except (ValueError, RecursionError):
            return None
        return transfer if params and isinstance(params, dict) else None


def one_token_fields(fields: Container[str]) -> dict[str, bytes]:
    """Return the fields that make a request's answer one token that is not streamed."""
    values = {"stream": b"false"}
    if "input" in fields and "messages" not in fields and "prompt" not in fields:  # /v1/responses
        values["max_output_tokens"] = b"1"
        values["store"] = b"false"
        if "stream_options" in fields:
            values["stream_options"] = b"null"
        return values
    if "max_completion_tokens" in fields:
        values["max_completion_tokens"] = b"1"
    if "max_tokens" in fields or "max_completion_tokens" not in fields:
        values["max_tokens"] = b"1"
    if "stream_options" in fields:
        values["stream_options"] = b"null"  # not allowed without stream
    if "min_tokens" in fields:
        values["min_tokens"] = b"0"
    return values
