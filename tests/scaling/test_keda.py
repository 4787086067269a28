"""KEDA's external scaler, asked over loopback by a real gRPC client whose messages protoc has made of KEDA's file."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc.aio
import pytest
from grpc_tools import protoc

from warmroute.config import ConfigError
from warmroute.scaling import keda
from warmroute.scaling.keda import KedaScaler

PROTO = """
syntax = "proto3";
package externalscaler;
option go_package = ".;externalscaler";
service ExternalScaler {
    rpc IsActive(ScaledObjectRef) returns (IsActiveResponse) {}
    rpc StreamIsActive(ScaledObjectRef) returns (stream IsActiveResponse) {}
    rpc GetMetricSpec(ScaledObjectRef) returns (GetMetricSpecResponse) {}
    rpc GetMetrics(GetMetricsRequest) returns (GetMetricsResponse) {}
}
message ScaledObjectRef { string name = 1; string namespace = 2; map<string, string> scalerMetadata = 3; }
message IsActiveResponse { bool result = 1; }
message GetMetricSpecResponse { repeated MetricSpec metricSpecs = 1; }
message MetricSpec { string metricName = 1; int64 targetSize = 2 [deprecated=true]; double targetSizeFloat = 3; }
message GetMetricsRequest { ScaledObjectRef scaledObjectRef = 1; string metricName = 2; }
message GetMetricsResponse { repeated MetricValue metricValues = 1; }
message MetricValue { string metricName = 1; int64 metricValue = 2 [deprecated=true]; double metricValueFloat = 3; }
"""
"""KEDA's contract (Apache-2.0), as its Go client speaks it."""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Made by the real compiler, apart from ours: what KEDA's Go client would speak."""
    folder = tmp_path_factory.mktemp("proto")
    (folder / "keda_contract.proto").write_text(PROTO)
    made = ["protoc", f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}", "keda_contract.proto"]
    assert protoc.main(made) == 0
    sys.path.insert(0, str(folder))
    try:
        import keda_contract_pb2
        import keda_contract_pb2_grpc
    finally:
        sys.path.remove(str(folder))
    return keda_contract_pb2, keda_contract_pb2_grpc


async def test_keda_gets_the_desired_number_of_nodes(stubs: Any) -> None:
    messages, services = stubs
    wanted, active = 3, True
    scaler = KedaScaler(lambda: wanted, lambda: active)
    await scaler.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{scaler.port}") as channel:
        client = services.ExternalScalerStub(channel)
        ref = messages.ScaledObjectRef(name="engines", namespace="llm", scalerMetadata={"scalerAddress": "x:1"})
        (spec,) = (await client.GetMetricSpec(ref)).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("desired_nodes", 1, 1.0)
        ask = messages.GetMetricsRequest(scaledObjectRef=ref, metricName=spec.metricName)
        (value,) = (await client.GetMetrics(ask)).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == ("desired_nodes", 3, 3.0)
        assert (await client.IsActive(ref)).result is True
        wanted, active = 0, False
        (value,) = (await client.GetMetrics(ask)).metricValues
        assert (value.metricValue, value.metricValueFloat) == (0, 0.0)
        assert (await client.IsActive(ref)).result is False
    await scaler.close()


async def test_keda_gets_a_push_when_the_first_node_is_desired(stubs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keda, "PUSH_S", 0.01)
    messages, services = stubs
    active = False
    scaler = KedaScaler(lambda: 1, lambda: active)
    await scaler.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{scaler.port}") as channel:
        stream = services.ExternalScalerStub(channel).StreamIsActive(messages.ScaledObjectRef(name="engines"))
        assert (await stream.read()).result is False
        active = True
        assert (await stream.read()).result is True
        active = False
        assert (await stream.read()).result is False
        stream.cancel()
    await asyncio.wait_for(scaler.close(), 5)  # also with a stream that was open


async def test_a_taken_port_is_a_configuration_error() -> None:
    scaler = KedaScaler(lambda: 1, lambda: True)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=f"KEDA's external scaler cannot listen on 127.0.0.1:{port}"):
        await scaler.start("127.0.0.1", port)
    server.close()
    await scaler.close()
