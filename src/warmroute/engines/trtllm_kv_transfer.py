"""TensorRT-LLM's KV transfer, as its documentation and its own disaggregated server describe it.

    context request       the client's, not streamed, with disaggregated_params {request_type: context_only}
    its response          choices[0].disaggregated_params: the request's id, its first token, an opaque state
    generation request    the client's, with these disaggregated_params and request_type generation_only, and the
                          prompt's token ids from the response

The first token is the context engine's. A context engine that finishes the answer with it (a stop token) says so in its
finish_reason; then there is nothing to transfer, and the generation engine gets the client's request as it is.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import msgspec

from warmroute.fleet.kv_transfer_protocol import MAX_PARAMETERS_BYTES
from warmroute.fleet.node import Node

_CONTEXT_ONLY: Final = b'{"request_type":"context_only"}'
MAX_IDS_BYTES: Final = 8 << 20
"""Token ids of a million tokens. Longer ones are ignored: the router parses them while nothing else runs."""
_NULL: Final = msgspec.Raw(b"null")
_UNFINISHED: Final = ("length", "not_finished", None)


class _Choice(msgspec.Struct):
    disaggregated_params: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = _NULL


class _Transfer(msgspec.Struct):
    disaggregated_params: msgspec.Raw
    prompt_token_ids: msgspec.Raw = _NULL


class TrtllmKvTransfer:
    def prefill_fields(self, fields: Container[str], prefill_node: Node, room: int) -> Mapping[str, bytes]:
        values = {"disaggregated_params": _CONTEXT_ONLY, "stream": b"false"}
        if "stream_options" in fields:
            values["stream_options"] = b"null"
        return values

    def decode_fields(
        self, fields: Container[str], prefill_node: Node, room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        if transfer is None:
            return {}
        known = msgspec.json.decode(transfer, type=_Transfer)
        values = {"disaggregated_params": bytes(known.disaggregated_params)}
        if bytes(known.prompt_token_ids) != b"null":
            name = "prompt_token_ids" if "messages" in fields else "prompt"
            values[name] = bytes(known.prompt_token_ids)
        return values

    def read_transfer(self, response: bytes) -> bytes | None:
        try:
            found = msgspec.json.decode(response, type=_Response)
            ids = found.prompt_token_ids if bytes(found.prompt_token_ids).startswith(b"[") else _NULL
            if len(bytes(ids)) > MAX_IDS_BYTES:
                return None
            msgspec.json.decode(ids)  # the decode node gets these bytes: all of them have to be valid
        except (ValueError, RecursionError):
            return None
        choice = found.choices[0] if len(found.choices) == 1 else None
        if choice is None or not choice.disaggregated_params or choice.finish_reason not in _UNFINISHED:
            return None
        params = msgspec.json.encode({**choice.disaggregated_params, "request_type": "generation_only"})
        if len(params) > MAX_PARAMETERS_BYTES:
            return None
        return msgspec.json.encode(_Transfer(msgspec.Raw(params), ids))
