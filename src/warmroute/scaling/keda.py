"""KEDA's external scaler, deprecated: tells KEDA over gRPC how many nodes are desired. Needs the extra `keda`. The next
release does without it: KEDA's trigger `metrics-api` reads the same number from GET /admin/scaling, with no port and no
packages of its own, and behind the admin API's token.

    trigger:  {type: external, metadata: {scalerAddress: HOST:PORT}}   (external-push scales up from zero at once)
              metadata may have `role: prefill` or `role: decode`: one ScaledObject for each of the two workloads

The metric is `desired_nodes` with a target of 1 per replica, so that KEDA's replicas reach that number. This module
builds the messages of KEDA's externalscaler.proto itself, without a compiler or generated files.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from warmroute.config import ConfigError

SERVICE = "externalscaler.ExternalScaler"
METRIC = "desired_nodes"
PUSH_S = 1.0
"""How often a stream checks for a change."""

_TYPES = {"string": 9, "bool": 8, "int64": 3, "double": 1}
_MESSAGES: dict[str, list[tuple[str, str, bool]]] = {
    # Fields in the order of their numbers: name, type, repeated. A map is a repeated Entry.
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
    """Return the message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name="externalscaler.proto", package="externalscaler", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, repeated) in enumerate(fields, 1):
            added = message.field.add(name=field, json_name=field, number=number, label=3 if repeated else 1)
            if kind in _TYPES:
                added.type = _TYPES[kind]
            else:
                added.type = 11
                added.type_name = (
                    f".externalscaler.{name}.ScalerMetadataEntry" if kind == "Entry" else f".externalscaler.{kind}"
                )
            if kind == "Entry":
                entry = message.nested_type.add(name="ScalerMetadataEntry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=9, label=1)
                entry.field.add(name="value", number=2, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()  # our own, because libraries share the default one
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}"))
        for name in _MESSAGES
    }


class KedaScaler:
    def __init__(self, desired_nodes: Callable[[str], int]) -> None:
        """`desired_nodes`: of a role (`prefill`, `decode`), or of the whole fleet for an empty one. Raises ValueError
        for another one."""
        self._desired_nodes = desired_nodes
        self._server: Any = None
        self._messages = messages()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Port 0 takes a free one; `self.port` says which. Raises ConfigError if the port is taken."""
        self._server = grpc.aio.server()
        once, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        calls = (
            ("IsActive", once, self._is_active, "ScaledObjectRef", "IsActiveResponse"),
            ("StreamIsActive", stream, self._stream, "ScaledObjectRef", "IsActiveResponse"),
            ("GetMetricSpec", once, self._spec, "ScaledObjectRef", "GetMetricSpecResponse"),
            ("GetMetrics", once, self._metrics, "GetMetricsRequest", "GetMetricsResponse"),
        )
        handlers = {
            name: handler(answer, self._messages[request].FromString, self._messages[response].SerializeToString)
            for name, handler, answer, request, response in calls
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"KEDA's external scaler cannot listen on {address}: {error}") from None
        await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _desired(self, scaled_object: Any, context: Any) -> int:
        """Return how many nodes a workload should have. Ends the call if the role in its metadata is unknown."""
        try:
            return max(0, self._desired_nodes(_role(scaled_object)))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def _is_active(self, request: Any, context: Any) -> Any:
        return self._messages["IsActiveResponse"](result=await self._desired(request, context) > 0)

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Send whether it is active, at once and at each change."""
        sent = None
        while True:
            active = await self._is_active(request, context)
            if active != sent:
                sent = active
                yield active
            await asyncio.sleep(PUSH_S)

    async def _spec(self, request: Any, context: Any) -> Any:
        await self._desired(request, context)
        spec = self._messages["MetricSpec"](metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return self._messages["GetMetricSpecResponse"](metricSpecs=[spec])

    async def _metrics(self, request: Any, context: Any) -> Any:
        desired = await self._desired(request.scaledObjectRef, context)
        value = self._messages["MetricValue"](metricName=METRIC, metricValue=desired, metricValueFloat=float(desired))
        return self._messages["GetMetricsResponse"](metricValues=[value])


def _role(scaled_object: Any) -> str:
    """Return the role in the trigger's metadata; empty if it has none."""
    return str(dict(scaled_object.scalerMetadata).get("role", ""))
