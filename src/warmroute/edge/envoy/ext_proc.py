"""Envoy's messages of ext_proc, read and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2

# The messages of Envoy's external processing (envoy/service/ext_proc/v3), as far as the picker uses them.
#
# The field numbers are Envoy's; fields that the picker does not use are left out, and enumerations are numbers. The
# classes are built here, without generated files. PyPI's xds-protos has all of them, but it overwrites the modules of
# opentelemetry-proto, so the extras `picker` and `otel` would exclude each other.

_PACKAGE: Final = "warmroute.ext_proc"
_OPTIONAL, _REPEATED, _MESSAGE = 1, 3, 11
_SCALARS: Final = {"int32": 5, "bool": 8, "string": 9, "bytes": 12}
_FOREIGN: Final = {
    "Struct": struct_pb2.Struct.DESCRIPTOR.full_name,
    "Duration": duration_pb2.Duration.DESCRIPTOR.full_name,
}
_ONEOF: Final = {
    "ProcessingRequest": ("request", 7),
    "ProcessingResponse": ("response", 7),
    "BodyMutation": ("mutation", 3),
}
"""By message: its oneof, and the highest number of a field in it."""
_MESSAGES: Final[dict[str, dict[int, tuple[str, str]]]] = {
    # Number: name and type. `[]`: repeated, `{}`: a map from strings.
    "HeaderValue": {1: ("key", "string"), 2: ("value", "string"), 3: ("raw_value", "bytes")},
    "HeaderMap": {1: ("headers", "HeaderValue[]")},
    "HeaderValueOption": {1: ("header", "HeaderValue"), 3: ("append_action", "int32")},
    "HeaderMutation": {1: ("set_headers", "HeaderValueOption[]"), 2: ("remove_headers", "string[]")},
    "StreamedBodyResponse": {1: ("body", "bytes"), 2: ("end_of_stream", "bool")},
    "BodyMutation": {1: ("body", "bytes"), 2: ("clear_body", "bool"), 3: ("streamed_response", "StreamedBodyResponse")},
    "CommonResponse": {
        2: ("header_mutation", "HeaderMutation"),
        3: ("body_mutation", "BodyMutation"),
        5: ("clear_route_cache", "bool"),
    },
    "HeadersResponse": {1: ("response", "CommonResponse")},
    "BodyResponse": {1: ("response", "CommonResponse")},
    "TrailersResponse": {1: ("header_mutation", "HeaderMutation")},
    "HttpStatus": {1: ("code", "int32")},
    "ImmediateResponse": {
        1: ("status", "HttpStatus"),
        2: ("headers", "HeaderMutation"),
        3: ("body", "bytes"),
        5: ("details", "string"),
    },
    "ProcessingResponse": {
        1: ("request_headers", "HeadersResponse"),
        2: ("response_headers", "HeadersResponse"),
        3: ("request_body", "BodyResponse"),
        4: ("response_body", "BodyResponse"),
        5: ("request_trailers", "TrailersResponse"),
        6: ("response_trailers", "TrailersResponse"),
        7: ("immediate_response", "ImmediateResponse"),
        8: ("dynamic_metadata", "Struct"),
        10: ("override_message_timeout", "Duration"),
    },
    "Metadata": {1: ("filter_metadata", "Struct{}")},
    "ProtocolConfiguration": {
        1: ("request_body_mode", "int32"),
        2: ("response_body_mode", "int32"),
        3: ("send_body_without_waiting_for_header_response", "bool"),
    },
    "HttpHeaders": {1: ("headers", "HeaderMap"), 3: ("end_of_stream", "bool")},
    "HttpBody": {1: ("body", "bytes"), 2: ("end_of_stream", "bool")},
    "HttpTrailers": {1: ("trailers", "HeaderMap")},
    "ProcessingRequest": {
        2: ("request_headers", "HttpHeaders"),
        3: ("response_headers", "HttpHeaders"),
        4: ("request_body", "HttpBody"),
        5: ("response_body", "HttpBody"),
        6: ("request_trailers", "HttpTrailers"),
        7: ("response_trailers", "HttpTrailers"),
        8: ("metadata_context", "Metadata"),
        9: ("attributes", "Struct{}"),
        11: ("protocol_config", "ProtocolConfiguration"),
    },
}

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""How Envoy passes a body: ProcessingMode.BodySendMode."""
OVERWRITE_IF_EXISTS_OR_ADD: Final = 2
"""HeaderValueOption.HeaderAppendAction."""


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="warmroute/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name],
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        oneof, highest = _ONEOF.get(name, ("", 0))
        if oneof:
            message.oneof_decl.add(name=oneof)
        for number, (field, kind) in fields.items():
            is_map, base = kind.endswith("{}"), kind.removesuffix("{}").removesuffix("[]")
            added = message.field.add(name=field, number=number, label=_REPEATED if kind != base else _OPTIONAL)
            if is_map:
                entry = "".join(word.title() for word in field.split("_")) + "Entry"
                nested = message.nested_type.add(name=entry)
                nested.options.map_entry = True
                nested.field.add(name="key", number=1, label=_OPTIONAL, type=_SCALARS["string"])
                _set_type(nested.field.add(name="value", number=2, label=_OPTIONAL), base)
                added.type, added.type_name = _MESSAGE, f".{_PACKAGE}.{name}.{entry}"
            else:
                _set_type(added, base)
            if number <= highest:
                added.oneof_index = 0
    pool = descriptor_pool.Default()  # the package is our own; Struct and Duration are in this pool
    pool.AddSerializedFile(file.SerializeToString())
    get = message_factory.GetMessageClass
    return {name: get(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _MESSAGE, f".{_FOREIGN.get(kind) or f'{_PACKAGE}.{kind}'}"


MESSAGES: Final = _build()
"""The classes by name."""
BodyMutation: Final = MESSAGES["BodyMutation"]
BodyResponse: Final = MESSAGES["BodyResponse"]
CommonResponse: Final = MESSAGES["CommonResponse"]
HeaderMutation: Final = MESSAGES["HeaderMutation"]
HeaderValue: Final = MESSAGES["HeaderValue"]
HeaderValueOption: Final = MESSAGES["HeaderValueOption"]
HeadersResponse: Final = MESSAGES["HeadersResponse"]
HttpStatus: Final = MESSAGES["HttpStatus"]
ImmediateResponse: Final = MESSAGES["ImmediateResponse"]
ProcessingRequest: Final = MESSAGES["ProcessingRequest"]
ProcessingResponse: Final = MESSAGES["ProcessingResponse"]
StreamedBodyResponse: Final = MESSAGES["StreamedBodyResponse"]
TrailersResponse: Final = MESSAGES["TrailersResponse"]


# The messages of envoy.service.ext_proc.v3: what the picker reads of Envoy's, and its own, serialized.

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

Request: Final = ProcessingRequest
Response: Final = ProcessingResponse
_OVERWRITE: Final = OVERWRITE_IF_EXISTS_OR_ADD

# Tags of fields: the number in the messages above, and that a length follows.
_RESPONSE_HEADERS, _RESPONSE, _HEADER_MUTATION = b"\x12", b"\x0a", b"\x12"
_SET_HEADERS, _REMOVE_HEADERS, _HEADER, _KEY, _RAW_VALUE = b"\x0a", b"\x12", b"\x0a", b"\x0a", b"\x1a"
_APPEND_ACTION: Final = b"\x18%c" % _OVERWRITE

CONTINUE_HEADERS: Final[bytes] = Response(request_headers=HeadersResponse()).SerializeToString()
CONTINUE_BODY: Final[bytes] = Response(request_body=BodyResponse()).SerializeToString()
CONTINUE_TRAILERS: Final[bytes] = Response(request_trailers=TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS: Final[bytes] = Response(response_headers=HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY: Final[bytes] = Response(response_body=BodyResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS: Final[bytes] = Response(response_trailers=TrailersResponse()).SerializeToString()


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
    mutation = HeaderMutation(
        set_headers=[
            HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode("latin-1")), append_action=_OVERWRITE)
            for name, value in fields.items()
        ],
        remove_headers=remove,
    )
    common = CommonResponse(clear_route_cache=True, header_mutation=mutation)
    metadata = struct_pb2.Struct()
    metadata.get_or_create_struct(LB_NAMESPACE)[DESTINATION] = endpoints
    if on_body:
        message = Response(dynamic_metadata=metadata, request_body=BodyResponse(response=common))
    else:
        message = Response(dynamic_metadata=metadata, request_headers=HeadersResponse(response=common))
    return bytes(message.SerializeToString())


def request_chunks(pieces: Sequence[bytes], ends: bool) -> Iterator[bytes]:
    """Send a body that was held back on to the node. `ends`: no trailers follow."""
    chunks = [piece[at : at + MAX_CHUNK_BYTES] for piece in pieces for at in range(0, len(piece), MAX_CHUNK_BYTES)]
    chunks = chunks or [b""]
    for number, chunk in enumerate(chunks, 1):
        body = BodyResponse(response=_chunk(chunk, ends and number == len(chunks)))
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
    return bytes(Response(response_body=BodyResponse(response=_chunk(body, ends))).SerializeToString())


def _chunk(body: bytes, ends: bool) -> Any:
    streamed = StreamedBodyResponse(body=body, end_of_stream=ends)
    return CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))


def immediate(status: int, body: bytes, headers: Sequence[tuple[str, str]], content_type: str) -> bytes:
    """Answer the request in place of a node."""
    fields = (("content-type", content_type), *headers)
    mutation = HeaderMutation(
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name.lower(), raw_value=value.encode("latin-1", "replace")),
                append_action=_OVERWRITE,
            )
            for name, value in fields
        ]
    )
    answer = ImmediateResponse(status=HttpStatus(code=status), headers=mutation, body=body, details="warmroute")
    return bytes(Response(immediate_response=answer).SerializeToString())


@lru_cache(maxsize=8)
def more_time(seconds: float) -> bytes:
    """Ask Envoy for this much time for the message that it waits for."""
    duration = duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1.0 * 1e9))
    return bytes(Response(override_message_timeout=duration).SerializeToString())
