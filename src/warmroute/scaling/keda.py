"""KEDA's external scaler: for those who let KEDA scale. Four calls over gRPC say how many nodes are wanted.

    trigger:  {type: external, metadata: {scalerAddress: HOST:PORT}}       (or external-push, to wake from zero at once)

The metric is `desired_nodes` with a target of 1 for each replica, so that the autoscaler arrives at that number. The
messages are KEDA's externalscaler.proto, put together here: no compiler and no generated file. Needs the extra `keda`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from warmroute.config import ConfigError

SERVICE = "externalscaler.ExternalScaler"
METRIC = "desired_nodes"
PUSH_S = 1.0
"""How often a stream looks whether it has something new to say."""

_TYPES = {"string": 9, "bool": 8, "int64": 3, "double": 1}
_MESSAGES: dict[str, list[tuple[str, str, bool]]] = {
    # Fields in the order of their numbers: name, type, whether it is repeated. A map is its entries, repeated.
    "ScaledObjectRef": [("name", "string", False), ("namespace", "string", False), ("scalerMetadata", "Entry", True)],
    "IsActiveResponse": [("result", "bool", False)],
    "MetricSpec": [
        ("metricName", "string", False),
        ("targetSize", "int64", False),
        ("targetSizeFloat", "double", False),
    ],
    "GetMetricSpecResponse": [("metricSpecs", "MetricSpec", True)],
    "GetMetricsRequest": [("scaledObjectRef", "ScaledObjectRef", False), ("metricName", "string", False)],
    "MetricValue": [
        ("metricName", "string", False),
        ("metricValue", "int64", False),
        ("metricValueFloat", "double", False),
    ],
    "GetMetricsResponse": [("metricValues", "MetricValue", True)],
}


def messages() -> dict[str, Any]:
    """The message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name="externalscaler.proto", package="externalscaler", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, repeated) in enumerate(fields, 1):
            made = message.field.add(name=field, json_name=field, number=number, label=3 if repeated else 1)
            if kind in _TYPES:
                made.type = _TYPES[kind]
            else:
                made.type = 11
                made.type_name = (
                    f".externalscaler.{name}.ScalerMetadataEntry" if kind == "Entry" else f".externalscaler.{kind}"
                )
            if kind == "Entry":
                entry = message.nested_type.add(name="ScalerMetadataEntry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=9, label=1)
                entry.field.add(name="value", number=2, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()  # our own: the default one is everybody's
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}"))
        for name in _MESSAGES
    }


class KedaScaler:
    """Answers KEDA. `desired` and `active` are asked anew for each call, on the event loop."""

    def __init__(self, desired: Callable[[], int], active: Callable[[], bool]) -> None:
        self._desired = desired
        self._active = active
        self._server: Any = None
        self._messages = messages()
        self.port = 0

    async def start(self, host: str, port: int, *, tls_cert: str = "", tls_key: str = "") -> None:
        """Port 0 takes a free one; `port` says which. Raises ConfigError where it cannot listen."""
        kinds = self._messages
        self._server = grpc.aio.server()
        handlers = {
            "IsActive": grpc.unary_unary_rpc_method_handler(
                self._is_active, *_ends(kinds, "ScaledObjectRef", "IsActiveResponse")
            ),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self._stream, *_ends(kinds, "ScaledObjectRef", "IsActiveResponse")
            ),
            "GetMetricSpec": grpc.unary_unary_rpc_method_handler(
                self._spec, *_ends(kinds, "ScaledObjectRef", "GetMetricSpecResponse")
            ),
            "GetMetrics": grpc.unary_unary_rpc_method_handler(
                self._metrics, *_ends(kinds, "GetMetricsRequest", "GetMetricsResponse")
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls_cert:
                self.port = self._server.add_secure_port(address, _credentials(tls_cert, tls_key))
            else:
                self.port = self._server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"KEDA's external scaler cannot listen on {address}: {error}") from None
        await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _is_active(self, _request: Any, _context: Any) -> Any:
        return self._messages["IsActiveResponse"](result=self._active())

    async def _stream(self, _request: Any, _context: Any) -> AsyncIterator[Any]:
        """Whether it is active, at once and whenever that changes."""
        said: bool | None = None
        while True:
            active = self._active()
            if active is not said:
                said = active
                yield self._messages["IsActiveResponse"](result=active)
            await asyncio.sleep(PUSH_S)

    async def _spec(self, _request: Any, _context: Any) -> Any:
        spec = self._messages["MetricSpec"](metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return self._messages["GetMetricSpecResponse"](metricSpecs=[spec])

    async def _metrics(self, _request: Any, _context: Any) -> Any:
        desired = max(0, self._desired())
        value = self._messages["MetricValue"](metricName=METRIC, metricValue=desired, metricValueFloat=float(desired))
        return self._messages["GetMetricsResponse"](metricValues=[value])


def _ends(kinds: dict[str, Any], request: str, response: str) -> tuple[Any, Any]:
    return kinds[request].FromString, kinds[response].SerializeToString


def _credentials(cert: str, key: str) -> Any:
    return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(cert).read_bytes())])
