"""The messages of Envoy's external processing (envoy/service/ext_proc/v3), as far as the picker uses them.

The field numbers are Envoy's; fields that the picker does not use are left out, and enumerations are numbers. The
classes are built here, without generated files. PyPI's xds-protos has all of them, but it overwrites the modules of
opentelemetry-proto, so the extras `picker` and `otel` would exclude each other.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2

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
