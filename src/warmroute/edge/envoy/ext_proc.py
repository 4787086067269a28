"""The messages of envoy.service.ext_proc.v3: what the picker reads of Envoy's, and its own, serialized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from google.protobuf import duration_pb2, struct_pb2

from warmroute.picker import ext_proc

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
ATTRIBUTES: Final = "envoy.filters.http.ext_proc"
UPSTREAM_ADDRESS: Final = "upstream.address"
RANK: Final = "x-data-parallel-rank"


MAX_CHUNK_BYTES: Final = 62_000
"""Of a body that is sent back to Envoy: some gateways take at most 64 KiB at once."""
MAX_SUBSET: Final = 4_096
"""Endpoints of a subset hint that the picker reads."""

Request: Final = ext_proc.ProcessingRequest
Response: Final = ext_proc.ProcessingResponse
_OVERWRITE: Final = ext_proc.OVERWRITE_IF_EXISTS_OR_ADD

# Tags of fields: the number in ext_proc.py, and that a length follows.
_RESPONSE_HEADERS, _RESPONSE, _HEADER_MUTATION = b"\x12", b"\x0a", b"\x12"
_SET_HEADERS, _REMOVE_HEADERS, _HEADER, _KEY, _RAW_VALUE = b"\x0a", b"\x12", b"\x0a", b"\x0a", b"\x1a"
_APPEND_ACTION: Final = b"\x18%c" % _OVERWRITE

CONTINUE_HEADERS: Final[bytes] = Response(request_headers=ext_proc.HeadersResponse()).SerializeToString()
CONTINUE_BODY: Final[bytes] = Response(request_body=ext_proc.BodyResponse()).SerializeToString()
CONTINUE_TRAILERS: Final[bytes] = Response(request_trailers=ext_proc.TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS: Final[bytes] = Response(response_headers=ext_proc.HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY: Final[bytes] = Response(response_body=ext_proc.BodyResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS: Final[bytes] = Response(response_trailers=ext_proc.TrailersResponse()).SerializeToString()


# What Envoy says.


def subset_hint(message: Any) -> list[str] | None:
    """Return the endpoints, or addresses, that the request may go to; None: all. A hint that cannot be read names none.

    Filters that copy a header into the metadata leave a list with commas in it, alone or as an element of a list.
    """
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata:
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    hint = fields[SUBSET]
    given = hint.string_value or ",".join([one.string_value for one in hint.list_value.values[:MAX_SUBSET]])
    return [one for one in map(str.strip, given.split(",", MAX_SUBSET)[:MAX_SUBSET]) if one]


def served_endpoint(message: Any) -> str:
    """Return the endpoint that answers the request; empty if Envoy does not say, or if none does."""
    metadata = message.metadata_context.filter_metadata
    if LB_NAMESPACE in metadata and SERVED in (fields := metadata[LB_NAMESPACE].fields):
        return str(fields[SERVED].string_value)
    if ATTRIBUTES in message.attributes and UPSTREAM_ADDRESS in (fields := message.attributes[ATTRIBUTES].fields):
        return str(fields[UPSTREAM_ADDRESS].string_value)
    return ""


# What the picker answers.


@lru_cache(maxsize=2048)
def decision(
    endpoints: str, on_body: bool, rank: int | None = None, authorization: str = "", remove: tuple[str, ...] = ()
) -> bytes:
    """Send the request to the first of these endpoints; the others are fallbacks. `on_body`: this answers the body,
    else the headers. `remove`: headers that the node must not see."""
    fields = {DESTINATION: endpoints}
    if rank is not None:
        fields[RANK] = str(rank)
    if authorization:
        fields["authorization"] = authorization
    mutation = ext_proc.HeaderMutation(
        set_headers=[
            ext_proc.HeaderValueOption(
                header=ext_proc.HeaderValue(key=name, raw_value=value.encode("latin-1")), append_action=_OVERWRITE
            )
            for name, value in fields.items()
        ],
        remove_headers=remove,
    )
    common = ext_proc.CommonResponse(clear_route_cache=True, header_mutation=mutation)
    metadata = struct_pb2.Struct()
    metadata.get_or_create_struct(LB_NAMESPACE)[DESTINATION] = endpoints
    if on_body:
        message = Response(dynamic_metadata=metadata, request_body=ext_proc.BodyResponse(response=common))
    else:
        message = Response(dynamic_metadata=metadata, request_headers=ext_proc.HeadersResponse(response=common))
    return bytes(message.SerializeToString())


def request_chunks(pieces: Sequence[bytes], ends: bool) -> Iterator[bytes]:
    """Send a body that was held back on to the node. `ends`: no trailers follow."""
    chunks = [piece[at : at + MAX_CHUNK_BYTES] for piece in pieces for at in range(0, len(piece), MAX_CHUNK_BYTES)]
    chunks = chunks or [b""]
    for number, chunk in enumerate(chunks, 1):
        body = ext_proc.BodyResponse(response=_chunk(chunk, ends and number == len(chunks)))
        yield bytes(Response(request_body=body).SerializeToString())


def response_headers(fields: Sequence[tuple[bytes, bytes]], remove: Sequence[str] = ()) -> bytes:
    """Let the response pass, with these headers in place of its own, and without those of `remove`.

    Written without protobuf, which takes three times as long: every response has another id, so nothing can be cached.
    """
    mutation = b"".join([_field(_SET_HEADERS, _header(name, value)) for name, value in fields])
    mutation += b"".join([_field(_REMOVE_HEADERS, name.encode()) for name in remove])
    return _field(_RESPONSE_HEADERS, _field(_RESPONSE, _field(_HEADER_MUTATION, mutation)))


def _header(name: bytes, value: bytes) -> bytes:
    return _field(_HEADER, _field(_KEY, name.lower()) + _field(_RAW_VALUE, value)) + _APPEND_ACTION


def _field(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return b"%b%c%b" % (tag, size, content)
    length = bytearray(tag)
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + content


def response_chunk(body: bytes, ends: bool) -> bytes:
    """Send a part of the response on to the client."""
    return bytes(Response(response_body=ext_proc.BodyResponse(response=_chunk(body, ends))).SerializeToString())


def _chunk(body: bytes, ends: bool) -> Any:
    streamed = ext_proc.StreamedBodyResponse(body=body, end_of_stream=ends)
    return ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=streamed))


def immediate(status: int, body: bytes, headers: Sequence[tuple[str, str]], content_type: str) -> bytes:
    """Answer the request in place of a node."""
    fields = (("content-type", content_type), *headers)
    mutation = ext_proc.HeaderMutation(
        set_headers=[
            ext_proc.HeaderValueOption(
                header=ext_proc.HeaderValue(key=name.lower(), raw_value=value.encode("latin-1", "replace")),
                append_action=_OVERWRITE,
            )
            for name, value in fields
        ]
    )
    answer = ext_proc.ImmediateResponse(
        status=ext_proc.HttpStatus(code=status), headers=mutation, body=body, details="warmroute"
    )
    return bytes(Response(immediate_response=answer).SerializeToString())


@lru_cache(maxsize=8)
def more_time(seconds: float) -> bytes:
    """Ask Envoy for this much time for the message that it waits for."""
    duration = duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1.0 * 1e9))
    return bytes(Response(override_message_timeout=duration).SerializeToString())
